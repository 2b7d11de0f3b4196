"""Statistics of a tensor on a CPU that are there when the call returns.

Where compiled code reads it no operator of torch takes part, so that no mode of the script's has to be kept from seeing any.
"""

from __future__ import annotations

import math

import torch

from bitwitness.stats import reader
from bitwitness.stats.parts import Read
from bitwitness.stats.reader import Figures
from bitwitness.store.rows import Measured

_SMALL = 1e-15  # squares of float32 numbers below this lose digits
_LARGE = 1e18  # and above this they overflow


def compiled(values: torch.Tensor, expected: Measured | None, *, zeros: bool) -> Measured | None:
    """Measure a plain tensor by compiled code; None where that does not take it, or does not suffice.

    ``expected``: what it held in the step before; where the sketch is still that, so is the rest.
    """
    native = reader.built()
    if native is None or not native.takes(values):
        return None
    count = values.numel()
    if expected is not None and expected.count == count and native.sketch(values) == expected.sketch:
        return expected._replace(hash=None)
    return of_figures(count, native.read(values, signed=True, zeros=zeros), zeros=zeros)


def compiled_sketch(values: torch.Tensor) -> float | None:
    """Return the sketch that `compiled` takes; None where compiled code does not take the tensor."""
    native = reader.built()
    return native.sketch(values) if native is not None and native.takes(values) else None


def of_figures(count: int, found: Figures | Read, *, zeros: bool) -> Measured | None:
    """Return what was read of so many values; None where some are not finite, or their squares have lost digits."""
    largest = max(-found.low, found.high)
    if not math.isfinite(found.squares) or not in_range(largest):
        return None
    none = count - int(found.there or 0) if zeros else None
    return Measured(
        count, 0, 0, 0, none, found.low, found.high, found.total / count, math.sqrt(found.squares), found.signed
    )


def in_range(largest: float) -> bool:
    """Tell whether squares of values up to this keep their digits in float32; not those of NaN."""
    return _SMALL < largest < _LARGE or largest == 0.0
