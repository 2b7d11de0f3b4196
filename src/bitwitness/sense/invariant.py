"""What an algebraic identity of an operator showed: the largest residual against its threshold, still on its device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FIGURES = ("ratio", "index", "residual", "threshold", "overflowed")


@dataclass(frozen=True, slots=True)
class Invariant:
    """One identity, checked on one call.

    ``figures``: float64 [5] on the operator's device, named by `FIGURES`: the largest residual over its threshold, the flat
    index where it is, residual and threshold there, and how many rows overflowed by their own values. ``ratio`` above 1
    is a failure.
    """

    name: str
    figures: Tensor


def largest(
    name: str,
    residual: Tensor,
    threshold: Tensor,
    judged: Tensor,
    overflowed: Tensor | None = None,
    *,
    per_row: int = 1,
) -> Invariant:
    """Find the worst place without waiting for the device.

    All tensors have one shape and at least one element; ``per_row`` of them in a row share one index. A residual that is not
    finite fails: ``judged`` (bool) is to be True only where the inputs, and therefore the threshold, are finite.
    """
    ratio = (residual / threshold).nan_to_num_(nan=math.inf, posinf=math.inf)
    worst, index = ratio.masked_fill_(~judged, 0.0).reshape(-1).max(0)
    at = index.reshape(1)
    there = [values.reshape(-1).index_select(0, at)[0].double() for values in (residual, threshold)]
    count = index.new_zeros(()) if overflowed is None else overflowed.sum()
    return Invariant(name, torch.stack([worst.double(), (index // per_row).double(), *there, count.double()]))


class Signs:
    """Random signs, drawn once for each length and device from a generator of our own.

    They are scaled by a power of two near ``length ** -0.5``, so that a weighted sum is about as large as one element and
    does not overflow where the elements do not; a power of two rounds nothing.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._kept: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    @staticmethod
    def scale(length: int) -> float:
        """Return the weights' magnitude."""
        return 2.0 ** -round(math.log2(max(length, 1)) / 2)

    def __call__(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return ``[length]`` weights of a floating dtype, the same ones for the same arguments."""
        key = (length, device, dtype)
        if key not in self._kept:
            bits = torch.randint(2, (length,), generator=self._generator, dtype=torch.int8)
            self._kept[key] = ((bits * 2 - 1).to(torch.float64) * self.scale(length)).to(device, dtype)
        return self._kept[key]
