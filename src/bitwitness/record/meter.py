"""Statistics of many tensors as they appear: at once on a CPU, on the device and read later elsewhere.

On a CPU the values are still in its cache when an operator has just made them, and reading a result costs nothing. On an
accelerator nothing may wait: the numbers stay there until the step's are fetched together, on the writer's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bitwitness.errors import UsageError
from bitwitness.numerics import HALF
from bitwitness.record.atonce import compiled, compiled_sketch, in_range, of_figures
from bitwitness.record.staging import Rows, Staging
from bitwitness.stats import HashBatch, exact_sketch, read, reader, sketch, sketch_of, sketch_rows, stats_of
from bitwitness.stats.host import to_host
from bitwitness.stats.launches import Launches
from bitwitness.stats.local import as_reals
from bitwitness.store.rows import Measured
from bitwitness.tap.identity import in_memory_order, unseen

_WIDE_DEVICES = ("cpu", "cuda")  # that compute in float64


class _Later(NamedTuple):
    """Tensors of one length whose statistics, a column each, are still on their device."""

    numbers: list[int]
    length: int
    figures: torch.Tensor


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
        self._reads_at_once = stats and not (hashed or deferred)
        self._done: dict[int, Measured] = {}
        self._hashes, self._hashed_numbers = HashBatch(), list[int]()
        self._later: list[_Later] = []
        self._launches: dict[torch.device, Launches] = {}
        self._launched: dict[int, int] = {}
        self._staging = Staging()

    def measured(self, number: int) -> Measured | None:
        """Return what was measured of a tensor since the last `drain`; None if that must wait."""
        if number not in self._done:
            self._measure_staged()
        return self._done.get(number)

    def measure(self, number: int, values: torch.Tensor, expected: Measured | None = None) -> None:
        """Measure a plain tensor.

        ``expected``: what it held in the step before; where the sketch is still that, so is the rest.
        """
        if self._reads_at_once and (found := compiled(values, expected, zeros=self._zeros)) is not None:
            self._done[number] = found
            return
        with unseen():
            # One order for all: strided sums are slow, and their rounding depends on the number of threads.
            self._measure(number, values if values.is_contiguous() else in_memory_order(values), expected)

    def _measure(self, number: int, values: torch.Tensor, expected: Measured | None) -> None:
        count = values.numel()
        if self._hashed:
            self._hashes.add(values)
            self._hashed_numbers.append(number)
        if not self._stats:
            self._done[number] = Measured(count)
            return
        try:
            if self._collects(values):
                if rows := self._staging.add(number, values):
                    self._measure_rows(rows)
            elif expected is not None and expected.count == count and self._is(values, expected):
                self._done[number] = expected._replace(hash=None)
            elif self._waits_for_nothing(values):
                self._measure_later(number, values)
            else:
                self._done[number] = self._measure_now(values, count)
        except (UsageError, RuntimeError, NotImplementedError):  # a dtype of which torch can take no extremes
            self._done[number] = Measured(count)

    def still(self, number: int, values: torch.Tensor) -> bool:
        """Tell whether a plain tensor holds what was measured, as far as its sketch tells; False where that must wait."""
        if self._reads_at_once and number in self._done and (signed := compiled_sketch(values)) is not None:
            return signed == self._done[number].sketch
        if not self._stats:
            return number in self._done
        if self._waits_for_nothing(values):
            return False
        with unseen():
            before = self.measured(number)
            return before is not None and self._is(in_memory_order(values), before)

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
        small = self._collects(values)
        if not small and not self._waits_for_nothing(values):
            return sketch_of(values)
        wide = values.float() if values.dtype in HALF or values.dtype.itemsize == 1 else values
        return float(sketch_rows(wide.view(1, -1)) if small else sketch(wide))

    def _measure_now(self, values: torch.Tensor, count: int) -> Measured:
        if not values.dtype.is_floating_point or count == 0:
            return self._exactly(values)
        found = of_figures(count, read(values, signed=True, zeros=self._zeros), zeros=self._zeros)
        return found or self._exactly(values)

    def _collects(self, values: torch.Tensor) -> bool:
        """Tell whether a tensor is measured together with others: what reads in one call needs no company."""
        if self._waits_for_nothing(values):
            return self._staging.takes(values) and not Launches.takes(values)
        return self._staging.takes(values) and reader.built() is None

    def _waits_for_nothing(self, values: torch.Tensor) -> bool:
        return self._deferred or values.device.type != "cpu"

    def _measure_staged(self) -> None:
        with unseen():  # also at a step's end, where modes of the script's may be on
            for rows in self._staging.flush():
                self._measure_rows(rows)

    def _measure_rows(self, rows: Rows) -> None:
        """Measure tensors of one length at once."""
        values, count = rows.values, rows.values.shape[1]
        if self._waits_for_nothing(values):
            self._later.append(_Later(rows.numbers, count, self._figures(values)))
            return
        low, high = values.amin(1), values.amax(1)  # on a CPU several times faster than both by aminmax
        sums = [values.sum(1), values.square().sum(1), sketch_rows(values)]
        zeros = [(values == 0).sum(1).to(values.dtype)] if self._zeros else []
        for index, (number, figures) in enumerate(
            zip(rows.numbers, torch.stack([low, high, *sums, *zeros]).t().tolist(), strict=True)
        ):
            low, high, total, squares, signed = figures[:5]
            if not in_range(max(-low, high)):
                self._done[number] = self._exactly(values[index])  # NaN and Inf, too
                continue
            none = int(figures[5]) if self._zeros else None
            self._done[number] = Measured(count, 0, 0, 0, none, low, high, total / count, math.sqrt(squares), signed)

    def _exactly(self, values: torch.Tensor) -> Measured:
        s = stats_of(values)
        zeros = s.zeros if self._zeros else None
        none = s.count == s.nan + s.pos_inf + s.neg_inf
        low, high, mean = (None, None, None) if none else (float(s.min), float(s.max), s.mean)
        return Measured(s.count, s.nan, s.pos_inf, s.neg_inf, zeros, low, high, mean, s.l2, exact_sketch(values))

    # -- without waiting -----------------------------------------------------------------------------------------

    def _measure_later(self, number: int, values: torch.Tensor) -> None:
        if values.numel() == 0:
            self._done[number] = Measured(0, 0, 0, 0, 0 if self._zeros else None, None, None, None, 0.0)
            return
        values = as_reals(values)
        if values.dtype.itemsize == 1 and not Launches.takes(values):
            values = values.float()
        if self._launch(number, values):
            return
        if not values.is_floating_point():
            values = values.to(_wide(values))
        self._later.append(_Later([number], values.numel(), self._figures(values.reshape(1, -1))))

    def _launch(self, number: int, values: torch.Tensor) -> bool:
        """Read a tensor by one launch, if its device has that."""
        if not Launches.takes(values):
            return False
        launches = self._launches.setdefault(values.device, Launches(values.device))
        self._launched[number] = values.numel()
        return launches.add(number, values, signed=True)

    def _figures(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what `_read_later` reads of each row of a matrix: [7 or 8, R], in the widest dtype of its device."""
        wide = _wide(rows)
        low, high = rows.aminmax(dim=1)
        accumulated = torch.float32 if rows.dtype == torch.float16 else wide  # whose squares float32 can hold
        counted = [rows.isnan(), rows.isposinf(), rows.isneginf(), *([rows == 0] if self._zeros else [])]
        summed = rows.float() if rows.dtype in HALF else rows
        numbers = [
            *(found.sum(1, dtype=wide) for found in counted),
            low,
            high,
            rows.sum(1, dtype=accumulated),
            torch.linalg.vector_norm(rows, dim=1, dtype=accumulated),
            sketch_rows(summed) if len(rows) > 1 or self._staging.takes(rows) else sketch(summed).view(1),
        ]
        return torch.stack([number.to(wide) for number in numbers])

    def drain(self) -> Callable[[], dict[int, Measured]]:
        """Return what yields the statistics since the last call; it may wait for the device, and runs on any thread."""
        self._measure_staged()
        done, self._done = self._done, {}
        hashes, self._hashes = self._hashes, HashBatch()
        numbers_hashed, self._hashed_numbers = self._hashed_numbers, []
        later, self._later = self._later, []
        places = [(number, found.length) for found in later for number in found.numbers]
        figures = _fetch([found.figures for found in later])
        joined = [one for launches in self._launches.values() for one in launches.join()]
        counts, self._launched = self._launched, {}
        launched = [(one.keys, _bring(one.figures)) for one in joined]
        digests = _fetch([digest.view(1, 1) for digest in hashes.finish()])

        def read() -> dict[int, Measured]:
            for (number, count), numbers in zip(places, figures(), strict=True):
                done[number] = self._read_later(count, numbers)
            for keys, rows in launched:
                for key, row in zip(keys, rows(), strict=True):
                    done[key] = self._read_launched(counts[key], row)
            for number, (digest,) in zip(numbers_hashed, digests(), strict=True):
                if number in done:  # else Ctrl-C came between the two, and no row has it
                    done[number] = done[number]._replace(hash=int(digest))
            return done

        return read

    def _read_launched(self, count: int, row: list[float]) -> Measured:
        nan, above, below, there = (int(x) for x in row[:4])
        low, high, total, squares, signed = row[4:]
        odd = nan + above + below
        zeros = count - there if self._zeros else None
        if odd == count:
            return Measured(count, nan, above, below, zeros, None, None, None, 0.0, None)
        sums = [x if math.isfinite(x) else None for x in (squares, signed)]
        l2 = None if sums[0] is None else math.sqrt(sums[0])
        return Measured(count, nan, above, below, zeros, low, high, total / (count - odd), l2, None if odd else sums[1])

    def _read_later(self, count: int, numbers: list[float]) -> Measured:
        nan, pos_inf, neg_inf = (int(x) for x in numbers[:3])
        zeros = int(numbers[3]) if self._zeros else None
        low, high, total, l2, signed = numbers[-5:]
        if nan + pos_inf + neg_inf:  # of the finite ones nothing is known then
            return Measured(count, nan, pos_inf, neg_inf, zeros)
        sums = [number if math.isfinite(number) else None for number in (l2, signed)]
        return Measured(count, 0, 0, 0, zeros, low, high, total / count, sums[0], sums[1])


def _wide(values: torch.Tensor) -> torch.dtype:
    return torch.float64 if values.device.type in _WIDE_DEVICES else torch.float32


def _fetch(matrices: list[torch.Tensor]) -> Callable[[], list[list[Any]]]:
    """Begin to bring matrices of equal height to the host, and return what waits for their columns, all in order."""
    together: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for matrix in matrices:
        together.setdefault((matrix.dtype, matrix.device), []).append(matrix)
    columns = {key: _bring(torch.cat(found, 1).t().contiguous()) for key, found in together.items()}

    def wait() -> list[list[Any]]:
        there = {key: iter(found()) for key, found in columns.items()}
        return [next(there[matrix.dtype, matrix.device]) for matrix in matrices for _ in range(matrix.shape[1])]

    return wait


def _bring(tensor: torch.Tensor) -> Callable[[], list[list[Any]]]:
    if tensor.device.type == "cpu":
        return tensor.tolist
    host, ready = to_host(tensor)

    def wait() -> list[list[Any]]:
        ready()
        found: list[list[Any]] = host.tolist()
        return found

    return wait
