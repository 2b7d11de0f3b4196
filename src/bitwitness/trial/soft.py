"""Where right kernels may differ: on special, very small and very large numbers. Each rule says why a failure there is none."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from bitwitness.trial.result import OutputResult

Soft = Callable[[OutputResult], str]
"""Says why a result that is outside of what is allowed is no error, or nothing."""
NOTED = ("zeros and subnormal numbers", "infinities", "NaN", "the largest numbers")
"""Variations in which right kernels may differ: told, and no warning."""
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


def overflows(one: OutputResult) -> str:
    """Tell where what is finite in float64 leaves the dtype's range on the way."""
    if one.dtype == "float64":
        return "no finer dtype tells what it should be"
    return "" if math.isfinite(one.value) else "overflows on its way"
