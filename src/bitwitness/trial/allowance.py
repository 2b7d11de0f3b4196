"""By how much a result may be off: half a unit in the last place, and what the noise of rounding leaves beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from bitwitness.numerics import HALF
from bitwitness.trial.figures import spacing

ALLOWANCE = 10.0
"""Times the spread that an element may be off by: uniform roundings sum to nearly normal errors, of which 10 sigma never
happen; what a kernel's own algorithm adds is of the same size. Of more than `_MANY_NUMBERS` the furthest is further off."""
_MANY_NUMBERS = 1e4
_ROOM, _HALF_ROOM = 2.0**-9, 2.0**-5
"""Of half a unit in the last place: for what the oracle itself rounds, and for half types what float32 leaves on the way."""
_NORMAL = 2.0
"""Variance of the square of a normal number."""
_BEYOND, _FEW_NUMBERS = 2.0, 30.0
"""Times what bounded noise reaches that it may reach; and the count of numbers below which what was seen says little."""
_LEANING, _LEANING_NUMBERS, _SHARED = 0.4, 64, 4.0
"""Units in the last place that results are off by in the mean, over so many different numbers, where a store
cuts or raises; and times what they may lean by together, by chance."""
_PRIOR = 4.0
"""Weight, in draws, of the spread of an element's neighbours in size: a few draws may all be small by chance."""


def least_allowance(truth: Tensor, dtype: torch.dtype, *, rounds_once: bool) -> Tensor:
    """Return by how much each element may be off in any case: noise would allow more.

    For half types that is half a unit in the last place and what float32 leaves; for others one unit, but for the operations
    that IEEE 754 has rounded correctly (``rounds_once``).
    """
    half = dtype in HALF
    share = (1 + _HALF_ROOM) / 2 if half else (1 + _ROOM) / 2 if rounds_once else 1.0
    return spacing(truth.masked_fill(~truth.isfinite(), 0.0), dtype) * share


def allowance(
    truth: Tensor, noisy: Sequence[Tensor], dtype: torch.dtype, *, leaps: bool = False, bounded: bool = False
) -> Tensor:
    """Return by how much each element may be off; float64, all of one shape.

    ``leaps``: noise moves few elements, by much, as casts to float8 do: it says nothing of the others. ``bounded``: what
    kernels leave is known, as it is of an elementary function.

    For half types nearly all of the noise is that of known roundings: a few of them never sum to what is unusual for many, and
    how far they go together is seen in the noise itself.
    """
    finite = truth.isfinite()
    size = truth.masked_fill(~finite, 0.0)
    deviations = [torch.where(finite & n.isfinite(), n - size, 0.0) for n in noisy]
    spread = _spread(deviations, size, leaps=leaps)
    half = dtype in HALF
    most = ALLOWANCE * max(1.0, math.sqrt(math.log(max(size.numel(), 1)) / math.log(_MANY_NUMBERS)))  # of normal errors
    times = min(most, _reach(deviations, spread)) if half or bounded else most
    return spacing(size, dtype) / 2 * (1 + (_HALF_ROOM if half else _ROOM)) + times * spread


def _reach(deviations: Sequence[Tensor], spread: Tensor) -> float:
    """Return how many standard deviations the noise goes at the most; more than that where there are few numbers to tell.

    Numbers that noise moves together count as one: their squares do not average to the same in each run, but like those of few.
    """
    if not deviations or not spread.numel():
        return ALLOWANCE
    squares = [(d / spread.clamp_min(1e-300)).square() for d in deviations]
    furthest = math.sqrt(max(float(s.max()) for s in squares))
    alike = statistics.pvariance([float(s.mean()) for s in squares])
    count = min(spread.numel(), _NORMAL / alike) if alike else spread.numel()
    return _BEYOND * furthest * (1 + _FEW_NUMBERS / max(len(deviations) * count, 1))


def lean(value: Tensor, truth: Tensor, noisy: Sequence[Tensor], dtype: torch.dtype) -> str:
    """Return what is to be told where every result is rounded one way: towards zero or away from it, up or down.

    A store that cuts or raises leaves errors of one sign, up to one unit in the last place, half a unit in the mean. What all
    elements share (a norm that they are divided by, a number that float32 does not hold) moves them together as well: by how
    much, the noise of a kernel that rounds nothing on its way tells.
    """
    among = value.isfinite() & truth.isfinite() & (truth != 0) & (value != truth)
    off = ((value - truth) / spacing(truth, dtype))[among]
    if off.numel() < _LEANING_NUMBERS or float(off.abs().max()) > 1.0 + _HALF_ROOM:
        return ""
    numbers = truth[among].to(dtype).double().unique().numel()  # torch counts none of eight bits
    if numbers < _LEANING_NUMBERS:  # what is nearly one number is rounded one way
        return ""
    for sign, ways in ((truth.sign(), ("away from zero", "towards zero")), (torch.ones_like(truth), ("up", "down"))):
        error, unit = off * sign[among], (sign / spacing(truth, dtype))[among]
        mean = float(error.mean())
        one_way = bool((error * math.copysign(1.0, mean) > -_HALF_ROOM).all())
        shared = math.sqrt(sum(float(((n - truth)[among] * unit).mean()) ** 2 for n in noisy) / max(len(noisy), 1))
        if one_way and abs(mean) >= max(_LEANING, _SHARED * shared):
            how = ways[0] if mean > 0 else ways[1]
            return f"every result is rounded {how}, by {abs(mean):.2f} units in the last place in the mean, and not to nearest"
    return ""


def _spread(deviations: Sequence[Tensor], size: Tensor, *, leaps: bool) -> Tensor:
    """Return the standard deviation of each element over the draws, drawn towards that of elements of its size."""
    draws = len(deviations)
    variance = torch.stack([d * d for d in deviations]).mean(0) if draws else torch.zeros_like(size)
    if not size.numel():
        return variance
    exponent = torch.frexp(size.abs())[1].reshape(-1).long()
    exponent = exponent.masked_fill(size.reshape(-1) == 0, int(exponent.min()) - 1)  # frexp says 0 of zero
    exponent = exponent - exponent.min()
    count = torch.bincount(exponent)
    usual = torch.bincount(exponent, weights=variance.reshape(-1)) / count.clamp_min(1)
    if leaps:
        for one in range(len(usual)):
            usual[one] = variance.reshape(-1)[exponent == one].median() if count[one] else 0.0
    return ((draws * variance + _PRIOR * usual[exponent].reshape(size.shape)) / (draws + _PRIOR)).sqrt()
