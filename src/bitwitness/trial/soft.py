"""Where right kernels may differ: on special, very small and very large numbers. Each rule says why a failure there is none."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from bitwitness.trial.call import Results
from bitwitness.trial.result import OutputResult

Soft = Callable[[OutputResult], str]
"""Says why a result that is outside of what is allowed is no error, or nothing."""
NOTED = ("zeros and subnormal numbers", "infinities", "NaN", "the largest numbers")
"""Variations in which right kernels may differ: told, and no warning."""
_SAME = 1e-6
"""By which share what float64 gives may differ between two ways to write the same."""
_TINY = 2.0**12
"""Times the smallest normal number below which results may come of numbers that were lost."""


def odd(one: OutputResult, *, products: bool, largest: bool) -> str:
    """Tell where right kernels make different things of infinities, NaN and the largest numbers.

    A number where there should be a NaN or an infinity is an error, but in products, which may leave a zero factor out. Sums
    of the largest numbers leave the range on their way, and what becomes of the infinity may be a number again.
    """
    if one.dtype == "float64":  # what float64 makes of it leaves the range as well
        return "may leave the range on its way"
    if math.isfinite(one.value):
        if products and largest:
            return "overflows on its way"
        return "makes a number of it" if products and not math.isfinite(one.expected) else ""
    return "is not finite where float64 is, or otherwise"


def kinked(one: OutputResult, *, alone: bool) -> str:
    """Tell where there is more than one right gradient, and where numbers get lost that are too small on the way.

    The first is at the kink of an absolute value, say; the second is not in what makes each number of one ``alone``.
    """
    if one.slot.startswith("grad"):
        return "another subgradient"
    tiny = _TINY * torch.finfo(getattr(torch, one.dtype, torch.float32)).smallest_normal
    return (
        "loses the smallest numbers on its way" if not alone and max(abs(one.value), abs(one.expected)) < tiny else ""
    )


def is_same(one: Results, other: Results) -> bool:
    """Whether two float64 runs give the same, but for a small share of the largest number of each result."""
    for a, b in zip(one.outputs, other.outputs, strict=False):
        if a.shape != b.shape:
            return False
        size = b.abs().double().nan_to_num(0.0, 0.0, 0.0)
        least = _SAME * float(size.max() if size.numel() else 0.0)
        if not a.is_complex() and not torch.allclose(a.double(), b.double(), rtol=_SAME, atol=least, equal_nan=True):
            return False
    return True


def changes_nothing(found: Results, due: Results, finite: Results, before: Results) -> bool:
    """Whether results that should be NaN, and are none, do not depend on what became NaN.

    ``due``: with NaN; ``finite``: with other numbers in its place; ``before``: with those that it took the place of.
    """
    for actual, nan, one, other in zip(found.outputs, due.outputs, finite.outputs, before.outputs, strict=False):
        if nan.is_floating_point() and actual.is_floating_point():
            lost = nan.isnan() & ~actual.detach().cpu().isnan()
            if bool((one[lost] != other[lost]).any()):
                return False
    return True


def overflows(one: OutputResult) -> str:
    """Tell where what is finite in float64 leaves the dtype's range on the way."""
    if one.dtype == "float64":
        return "no finer dtype tells what it should be"
    return "" if math.isfinite(one.value) else "overflows on its way"
