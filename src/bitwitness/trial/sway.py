"""Whether all of a result is larger or smaller than it should be: by less than each element may be off, and yet no rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bitwitness.numerics import HALF, unit_roundoff
from bitwitness.trial.allowance import ALLOWANCE
from bitwitness.trial.asked import Asked

_NUMBERS = 64
_LEAST = 2.0**-12
"""By which share all of a result may be off in any case."""


def swayed(asked: Asked, noisy: Sequence[Tensor]) -> str:
    """Return what is to be told where a result in a half type is off by a factor: roundings, which go both ways, leave none.

    ``noisy``: the same in runs with random roundings, before their own: what many elements share moves them together there.
    """
    value, truth, dtype = asked.value, asked.truth, asked.dtype
    among = value.isfinite() & truth.isfinite() & (truth.abs() > torch.finfo(dtype).smallest_normal)
    if dtype not in HALF or int(among.sum()) < _NUMBERS:
        return ""
    different = truth[among].to(dtype).unique().numel()  # of the same number all are rounded the same way
    if different < _NUMBERS:
        return ""
    off = factor(value[among], truth[among]) - 1
    weights = truth[among].square()
    numbers = min(
        different, float(weights.sum()) ** 2 / float(weights.square().sum())
    )  # that count, of different sizes
    own = unit_roundoff(torch.float32 if asked.is_wider else dtype) / math.sqrt(3 * numbers)
    shared = sway([n[among] for n in noisy], truth[among])
    if not abs(off) > ALLOWANCE * math.hypot(own, shared) + _LEAST:
        return ""
    how = "large" if off > 0 else "small"
    return f"all of it is {abs(off):.2%} too {how}: less than a rounding of each number, but roundings go both ways"


def sway(noisy: Sequence[Tensor], truth: Tensor) -> float:
    """Return by which share all of a result is larger or smaller in runs with noise, as a standard deviation."""
    return math.sqrt(sum((factor(n, truth) - 1) ** 2 for n in noisy) / max(len(noisy), 1))


def factor(one: Tensor, other: Tensor) -> float:
    """Return by which factor one is the other, by least squares."""
    size = float(other.square().sum())
    return float((one * other).sum()) / size if size else 1.0
