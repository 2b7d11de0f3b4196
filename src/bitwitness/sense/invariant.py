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
    index where it is, residual and threshold there, and how many rows overflowed lawfully. ``ratio`` is at most 1 where the identity holds, and at least 2 where it does not.
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

    A NaN residual fails, and so does an infinite threshold: both come from a non-finite output, since ``judged`` (bool) is
    True only where the inputs are finite. All tensors have one shape and at least one element; ``per_row`` of them in
    a row share one index.
    """
    passed = (residual <= threshold) & torch.isfinite(threshold)
    ratio = residual.double() / threshold.double()
    failing = ratio.nan_to_num(nan=math.inf, posinf=math.inf).clamp_min(2.0)
    failing = torch.where(torch.isfinite(threshold), failing, math.inf)
    ratio = torch.where(passed, ratio.nan_to_num(nan=0.0), failing)  # 0 of 0 passes
    ratio = torch.where(judged, ratio, 0.0).reshape(-1)
    worst, index = ratio.max(0)
    count = worst.new_zeros(()) if overflowed is None else overflowed.sum().double()
    at = index.reshape(1)
    there = [values.reshape(-1).index_select(0, at)[0].double() for values in (residual, threshold)]
    return Invariant(name, torch.stack([worst, (index // per_row).double(), *there, count]))


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
