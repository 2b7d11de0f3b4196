"""What a fault does to a value: which elements it strikes, and what becomes of them.

The effects take a tensor and return a corrupted copy, laid out as `torch.Tensor.clone` lays it out; the
argument keeps its bits. Positions are flat indices in row-major order, whatever the strides; None stands for
every element. The work grows with the number of struck elements, apart from the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bitwitness.errors import UsageError
from bitwitness.inject.faults import PATTERNS, Fault

TILE = 16  # rows and columns: what a matrix unit of a GPU or of an NPU multiplies at once
WARP = 32  # neighbouring elements: the threads of a GPU that run in step

Positions = npt.NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """The bits of a float dtype: one sign bit, then the exponent, then the mantissa."""

    width: int
    exponent: int
    raw: torch.dtype

    @property
    def mantissa(self) -> int:
        """The number of stored mantissa bits."""
        return self.width - 1 - self.exponent


FORMATS = {
    torch.float64: FloatFormat(64, 11, torch.int64),
    torch.float32: FloatFormat(32, 8, torch.int32),
    torch.float16: FloatFormat(16, 5, torch.int16),
    torch.bfloat16: FloatFormat(16, 8, torch.int16),
    torch.float8_e5m2: FloatFormat(8, 5, torch.uint8),
    torch.float8_e4m3fn: FloatFormat(8, 4, torch.uint8),
    torch.float8_e5m2fnuz: FloatFormat(8, 5, torch.uint8),
    torch.float8_e4m3fnuz: FloatFormat(8, 4, torch.uint8),
}
"""The dtypes that can be struck."""


def choose(
    pattern: str, shape: torch.Size | tuple[int, ...], rng: np.random.Generator, element: int | None = None
) -> Positions:
    """Return the positions that a pattern strikes in a tensor of this shape.

    ``element`` is a flat index that the pattern contains, drawn if None. The tensor is seen as a matrix with
    the last dimension as columns. Tiles lie on a grid of 16 by 16; those at the border are cut.
    """
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(0, np.int64)
    if element is not None and element >= count:
        raise UsageError(f"element {element} is not in a tensor of shape {tuple(shape)}; expected one below {count}")
    anchor = int(rng.integers(count)) if element is None else element
    columns = int(shape[-1]) if len(shape) else 1
    row, column = divmod(anchor, columns)
    match pattern:
        case "all":
            return None
        case "element":
            return np.array([anchor], np.int64)
        case "row":
            return np.arange(row * columns, (row + 1) * columns)
        case "column":
            return np.arange(column, count, columns)
        case "warp":
            return np.arange(anchor % WARP, count, WARP)
        case "tile":
            top, left = row - row % TILE, column - column % TILE
            rows = np.arange(top, min(top + TILE, count // columns))
            return np.add.outer(rows * columns, np.arange(left, min(left + TILE, columns))).ravel()
    raise UsageError(f"there is no pattern {pattern!r}; expected one of {', '.join(PATTERNS)}")


def choose_random(count: int, probability: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return positions below ``count``, each taken with ``probability``, independently."""
    struck = int(rng.binomial(count, probability))
    return rng.choice(count, struck, replace=False, shuffle=False).astype(np.int64)


def flip_bit(x: torch.Tensor, positions: Positions, bit: int) -> torch.Tensor:
    """Invert a bit, counted from the least significant; a negative one from the top, -1 being the sign."""
    mask = _mask(x, bit)
    return _change_bits(x, positions, lambda bits: bits ^ mask)


def force_bit(x: torch.Tensor, positions: Positions, bit: int, value: int) -> torch.Tensor:
    """Set a bit to ``value``, 0 or 1."""
    mask = _mask(x, bit)
    return _change_bits(x, positions, lambda bits: bits | mask if value else bits & ~mask)


def raise_exponent(x: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Set the highest exponent bit that is 0 (0.0 becomes 2.0, 1.0 becomes Inf); Inf and NaN stay."""
    form = _format(x)

    def change(bits: torch.Tensor) -> torch.Tensor:
        pending = torch.ones_like(bits, dtype=torch.bool)
        for place in range(form.exponent):
            mask = 1 << (form.width - 2 - place)
            hit = pending & (bits & mask == 0)
            bits = torch.where(hit, bits | mask, bits)
            pending = pending & ~hit
        return bits

    return _change_bits(x, positions, change)


def add_ulps(x: torch.Tensor, positions: Positions, ulps: int) -> torch.Tensor:
    """Add units in the last place to the magnitude; the carry runs into the exponent, not the sign."""
    below_sign = (1 << (_format(x).width - 1)) - 1

    def change(bits: torch.Tensor) -> torch.Tensor:
        return (bits & ~below_sign) | ((bits + ulps) & below_sign)

    return _change_bits(x, positions, change)


def multiply(x: torch.Tensor, positions: Positions, factor: float) -> torch.Tensor:
    """Multiply by ``factor``, rounded to ``x``'s dtype."""
    return _change_values(x, positions, lambda values: values * factor)


def multiply_max(x: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Replace by the largest magnitude in the whole tensor."""
    if x.numel() == 0:
        return x.detach().clone()
    largest = _wide(x.detach()).abs().max()
    return _change_values(x, positions, largest.expand_as)


def nullify(x: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Replace by +0."""
    _format(x)
    return _change_bits(x, positions, torch.zeros_like)


def permute(x: torch.Tensor, positions: Positions, rng: np.random.Generator) -> torch.Tensor:
    """Let the chosen elements change places at random; the bits move, none is changed."""

    def change(bits: torch.Tensor) -> torch.Tensor:
        order = torch.from_numpy(rng.permutation(bits.numel())).to(bits.device)
        return bits.reshape(-1)[order].reshape(bits.shape)

    return _change_bits(x, positions, change)


def reaches(fault: Fault, x: torch.Tensor) -> bool:
    """Tell whether the tensor has the bit and the element that the fault strikes."""
    form = FORMATS.get(x.dtype)
    if form is None or x.numel() == 0:
        return False
    if fault.kind in {"bitflip", "stuck_at"} and not -form.width <= fault.bit < form.width:
        return False
    return fault.element is None or fault.element < x.numel()


def corrupt(x: torch.Tensor, fault: Fault, rng: np.random.Generator) -> torch.Tensor | None:
    """Return what the fault makes of ``x``, or None if no element was drawn.

    Raises
    ------
    UsageError
        The dtype, the bit or the element is not there (see `reaches`).

    """
    if fault.element_probability is not None:
        positions: Positions = choose_random(x.numel(), fault.element_probability, rng)
    else:
        positions = choose(fault.pattern or "element", x.shape, rng, fault.element)
    if positions is not None and positions.size == 0:
        return None
    effects: dict[str, Callable[[], torch.Tensor]] = {
        "bitflip": lambda: flip_bit(x, positions, fault.bit),
        "exponent_msb": lambda: raise_exponent(x, positions),
        "stuck_at": lambda: force_bit(x, positions, fault.bit, fault.value),
        "carry": lambda: add_ulps(x, positions, fault.ulps),
        "multiply": lambda: multiply(x, positions, fault.factor),
        "multiply_max": lambda: multiply_max(x, positions),
        "nullify": lambda: nullify(x, positions),
        "permute": lambda: permute(x, positions, rng),
    }
    return effects[fault.kind]()


def count_changed(before: torch.Tensor, after: torch.Tensor) -> int:
    """Return the number of elements whose bits differ; waits for the device."""
    raw = _format(before).raw
    return int((before.detach().view(raw) != after.view(raw)).sum())


def _format(x: torch.Tensor) -> FloatFormat:
    form = FORMATS.get(x.dtype)
    if form is None:
        names = ", ".join(map(_name, FORMATS))
        raise UsageError(f"a tensor of dtype {_name(x.dtype)} cannot be struck; expected {names}")
    return form


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mask(x: torch.Tensor, bit: int) -> int:
    width = _format(x).width
    if not -width <= bit < width:
        raise UsageError(
            f"there is no bit {bit} in {_name(x.dtype)}; expected 0 (the lowest) to {width - 1} (the sign), or -1 to {-width}"
        )
    mask = 1 << (bit % width)
    return mask - (1 << 64) if mask == 1 << 63 else mask  # int64 holds the top bit as a negative number


def _change_bits(x: torch.Tensor, positions: Positions, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Rewrite the chosen elements' bits; ``change`` maps int64 to int64, of which the low bits are kept."""
    raw = _format(x).raw
    out = x.detach().clone()
    if out.numel() == 0 or (positions is not None and positions.size == 0):
        return out
    bits = out.view(raw)
    if positions is None:
        bits.copy_(change(bits.to(torch.int64)))
        return out
    where = torch.unravel_index(torch.from_numpy(positions).to(x.device), x.shape)
    bits[where] = change(bits[where].to(torch.int64)).to(raw)
    return out


def _change_values(
    x: torch.Tensor, positions: Positions, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    raw = _format(x).raw

    def on_bits(bits: torch.Tensor) -> torch.Tensor:
        return change(_wide(bits.to(raw).view(x.dtype))).to(x.dtype).view(raw).to(torch.int64)

    return _change_bits(x, positions, on_bits)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.to(torch.float32)
