"""Statistics of many tensors as they appear: at once on a CPU, on the device and read later elsewhere.

On a CPU the values are still in its cache when an operator has just made them, and reading a result costs nothing. On an
accelerator nothing may wait: the numbers stay there until the step's are fetched together, on the writer's thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from bitwitness.errors import UsageError
from bitwitness.stats import HashBatch, exact_sketch, quick_l2, sketch, stats_of
from bitwitness.store.rows import Measured

_SMALL = 1e-15  # squares of float32 numbers below this lose digits
_LARGE = 1e18  # and above this they overflow
_HALVES = (torch.float16, torch.bfloat16)
_WIDE_DEVICES = ("cpu", "cuda")  # that compute in float64
_AT_HAND = 1 << 20
"""Elements of the buffer for half types: 4 MiB of float32. To have such memory from the system each time costs a pass."""
_TWO_PASSES = 1 << 16
"""Elements from which on a CPU finds both extremes quicker in two passes than in torch's one (88 against 106 us at 2^19)."""


class Meter:
    """Measures tensors by number.

    Parameters
    ----------
    stats, hashed, zeros
        What to take.
    deferred
        Wait for nothing also on a CPU, as nothing is waited for on an accelerator.

    """

    def __init__(self, *, stats: bool, hashed: bool, zeros: bool, deferred: bool = False) -> None:
        self._stats = stats
        self._hashed = hashed
        self._zeros = zeros
        self._deferred = deferred
        self._done: dict[int, Measured] = {}
        self._hashes, self._hashed_numbers = HashBatch(), list[int]()
        self._later: dict[torch.dtype, list[tuple[int, int, list[torch.Tensor]]]] = {}
        self._buffer = _Buffer()

    def measured(self, number: int) -> Measured | None:
        """Return what was measured of a tensor since the last `drain`; None if that must wait."""
        return self._done.get(number)

    def measure(self, number: int, values: torch.Tensor, expected: Measured | None = None) -> None:
        """Measure a plain tensor.

        ``expected``: what it held in the step before; where the sketch is still that, so is the rest.
        """
        count = values.numel()
        if expected is not None and expected.count == count and self._is(values, expected):
            if self._hashed:
                self._hashes.add(values)
                self._hashed_numbers.append(number)
            self._done[number] = expected._replace(hash=None)
            return
        if self._hashed:
            self._hashes.add(values)
            self._hashed_numbers.append(number)
        if not self._stats:
            self._done[number] = Measured(count)
            return
        try:
            if self._deferred or values.device.type != "cpu":
                self._measure_later(number, values)
            else:
                self._done[number] = self._measure_now(values, count)
        except (UsageError, RuntimeError, NotImplementedError):  # a dtype of which torch can take no extremes
            self._done[number] = Measured(count)

    def still(self, number: int, values: torch.Tensor) -> bool:
        """Tell whether a plain tensor holds what was measured, as far as its sketch tells; False where that must wait."""
        before = self._done.get(number)
        if not self._stats:
            return before is not None
        return before is not None and self._is(values, before)

    def _is(self, values: torch.Tensor, before: Measured) -> bool:
        """Return whether a tensor's sketch is still what it was."""
        try:
            return before.sketch is not None and self._signed(values) == before.sketch
        except (RuntimeError, NotImplementedError):
            return False

    def _signed(self, values: torch.Tensor) -> float | None:
        """Return the sketch as `measure` takes it."""
        if not values.dtype.is_floating_point or not values.numel():
            return exact_sketch(values)
        return float(sketch(values.float() if values.dtype in _HALVES or values.dtype.itemsize == 1 else values))

    def _measure_now(self, values: torch.Tensor, count: int) -> Measured:
        dtype = values.dtype
        if not dtype.is_floating_point or count == 0:
            return self._exactly(values)
        if dtype in _HALVES or dtype.itemsize == 1:
            values = self._buffer.float32(values)  # their own range and precision are too narrow for sums
        least, most = (values.amin(), values.amax()) if count > _TWO_PASSES else values.aminmax()
        low, high = least.item(), most.item()
        total = values.sum().item()
        l2 = quick_l2(values)
        signed = sketch(values).item()
        largest = max(-low, high)
        if not _SMALL < largest < _LARGE and largest != 0.0:
            return self._exactly(values)  # NaN and Inf, too
        zeros = count - int(values.count_nonzero()) if self._zeros else None
        return Measured(count, 0, 0, 0, zeros, low, high, total / count, l2, signed)

    def _exactly(self, values: torch.Tensor) -> Measured:
        s = stats_of(values)
        zeros = s.zeros if self._zeros else None
        none = s.count == s.nan + s.pos_inf + s.neg_inf
        low, high, mean = (None, None, None) if none else (float(s.min), float(s.max), s.mean)
        return Measured(s.count, s.nan, s.pos_inf, s.neg_inf, zeros, low, high, mean, s.l2, exact_sketch(values))

    # -- without waiting -----------------------------------------------------------------------------------------

    def _measure_later(self, number: int, values: torch.Tensor) -> None:
        count = values.numel()
        if count == 0:
            self._done[number] = Measured(0, 0, 0, 0, 0 if self._zeros else None, None, None, None, 0.0)
            return
        values = _real(values)
        count = values.numel()
        if values.dtype.itemsize == 1:
            values = values.float()
        wide = torch.float64 if values.device.type in _WIDE_DEVICES else torch.float32
        if not values.is_floating_point():
            values = values.to(wide)
        low, high = values.aminmax()
        accumulated = torch.float32 if values.dtype == torch.float16 else wide  # whose squares float32 can hold
        numbers = [
            values.isnan().sum(),
            values.isposinf().sum(),
            values.isneginf().sum(),
            (values == 0).sum() if self._zeros else None,
            low,
            high,
            values.sum(dtype=accumulated),
            torch.linalg.vector_norm(values, dtype=accumulated),
            sketch(values.float() if values.dtype in _HALVES else values),
        ]
        found = [x.to(wide) for x in numbers if x is not None]
        self._later.setdefault(wide, []).append((number, count, found))

    def drain(self) -> Callable[[], dict[int, Measured]]:
        """Return what yields the statistics since the last call; it may wait for the device, and runs on any thread."""
        done, self._done = self._done, {}
        hashes, self._hashes = self._hashes, HashBatch()
        numbers_hashed, self._hashed_numbers = self._hashed_numbers, []
        later, self._later = self._later, {}
        fetched = {
            dtype: ([(number, count) for number, count, _ in found], _fetch([x for *_, xs in found for x in xs]))
            for dtype, found in later.items()
        }
        digests = _fetch(hashes.finish())

        def read() -> dict[int, Measured]:
            for places, fetch in fetched.values():
                numbers = fetch()
                width = len(numbers) // len(places)
                for i, (number, count) in enumerate(places):
                    done[number] = self._read_later(count, numbers[i * width : (i + 1) * width])
            for number, digest in zip(numbers_hashed, digests(), strict=True):
                done[number] = done[number]._replace(hash=int(digest))
            return done

        return read

    def _read_later(self, count: int, numbers: list[float]) -> Measured:
        nan, pos_inf, neg_inf = (int(x) for x in numbers[:3])
        zeros = int(numbers[3]) if self._zeros else None
        low, high, total, l2, signed = numbers[-5:]
        if nan + pos_inf + neg_inf:  # of the finite ones nothing is known then
            return Measured(count, nan, pos_inf, neg_inf, zeros)
        sums = [number if math.isfinite(number) else None for number in (l2, signed)]
        return Measured(count, 0, 0, 0, zeros, low, high, total / count, sums[0], sums[1])


class _Buffer(threading.local):
    """Memory for one tensor in float32, for each thread its own."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def float32(self, values: torch.Tensor) -> torch.Tensor:
        """Return a contiguous CPU tensor's values in float32, until the next call."""
        count = values.numel()
        if count > _AT_HAND:
            return values.float()
        if self._memory is None or self._memory.numel() < count:
            size = min(_AT_HAND, 1 << count.bit_length())
            with torch.inference_mode(mode=False):  # what is made in an evaluation may not be written to after it
                self._memory = torch.empty(size, dtype=torch.float32, device=values.device)
        return self._memory[:count].copy_(values.view(-1))


def _real(values: torch.Tensor) -> torch.Tensor:
    """Return real numbers as they are, and complex ones as pairs of them."""
    return torch.view_as_real(values) if values.is_complex() else values


def _fetch(scalars: list[torch.Tensor]) -> Callable[[], list[float]]:
    """Begin to bring 0-d tensors of one dtype to the host, and return what waits for them."""
    if not scalars:
        return list
    stacked = torch.stack([scalar.to(scalars[0].device) for scalar in scalars])
    if stacked.device.type == "cpu":
        return stacked.tolist
    host, ready = to_host(stacked)

    def wait() -> list[float]:
        ready()
        numbers: list[float] = host.tolist()
        return numbers

    return wait


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Begin to copy a device's tensor into pinned memory; return the copy and what waits until it is complete."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    return host, event.synchronize
