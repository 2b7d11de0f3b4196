"""The element of a result that is furthest beyond what rounding allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WorstElement:
    """The worst element of a result, against what rounding allows there.

    ``at``: its flat index; ``value``, ``expected``: the operator's number and float64's; ``ratio``: the error over the
    allowed one, infinite for a NaN or Inf that float64 does not have.
    """

    at: int
    value: float
    expected: float
    ratio: float

    @property
    def wrong(self) -> bool:
        """Whether rounding cannot explain it."""
        return self.ratio > 1


def gaps(value: Tensor, expected: Tensor, defined: Tensor | None = None) -> Tensor:
    """Return ``|value - expected|``, element by element; both float64 of one shape.

    It is 0 where both are equal (infinities, too) and where ``defined`` (bool, of that shape) is False; infinite where the
    difference is no number.
    """
    equal = value == expected
    alike = equal if defined is None else equal | ~defined
    return (value - expected).abs().masked_fill_(alike, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)


def worst_element(value: Tensor, expected: Tensor, allowed: Tensor) -> WorstElement:
    """Return the element whose error exceeds what is allowed there by most.

    Parameters
    ----------
    value, expected, allowed
        float64 of one shape. A pair of NaNs is no error. Without any element the answer is one of no error, at 0.

    """
    if not value.numel():
        return WorstElement(0, 0.0, 0.0, 0.0)
    error = gaps(value, expected, ~(value.isnan() & expected.isnan()))
    ratio = (error / allowed.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num_(nan=math.inf, posinf=math.inf)
    ratio[error == 0] = 0.0  # also where nothing is allowed, or anything
    at = int(ratio.argmax())
    return WorstElement(at, float(value.flatten()[at]), float(expected.flatten()[at]), float(ratio.flatten()[at]))
