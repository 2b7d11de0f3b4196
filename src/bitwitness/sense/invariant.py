"""What an algebraic identity of an operator showed: the largest residual against its threshold, still on its device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwitness.sense.lastreading import LastReading
from bitwitness.tap.operators import OpCall

NONE_IS_WRONG = 0.5
"""Threshold of a residual that counts wrong numbers."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """One identity, checked on one call; the tensors are on the operator's device.

    Attributes
    ----------
    name
        The identity.
    worst
        The largest residual over its threshold, 0-d; above 1, or NaN, is a failure.
    index
        Where that is, flat, int64, 0-d; ``per_row`` of them are a row.
    residual, threshold
        All of either.
    overflowed
        How many rows overflowed by their own values, 0-d; None where none can.

    """

    name: str
    worst: Tensor
    index: Tensor
    residual: Tensor
    threshold: Tensor
    overflowed: Tensor | None
    per_row: int

    def figures(self, worst: float, index: int, overflowed: int) -> dict[str, float]:
        """Return what is told of it: the ratio, row, residual and threshold of the worst place; waits for the device."""
        there = torch.stack([values.reshape(-1)[index].double() for values in (self.residual, self.threshold)]).tolist()
        return {
            "ratio": math.inf if math.isnan(worst) else worst,
            "index": float(index // self.per_row),
            "residual": there[0],
            "threshold": there[1],
            "overflowed": float(overflowed),
        }


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
    ratio = torch.where(judged, residual / threshold, 0.0)
    worst, index = ratio.reshape(-1).max(0)
    count = None if overflowed is None else overflowed.sum()
    return Invariant(name, worst, index, residual, threshold, count, per_row)


def counted(name: str, wrong: Tensor) -> Invariant:
    """Judge counts of wrong numbers, float32, by row: there may be none."""
    return largest(name, wrong, torch.full_like(wrong, NONE_IS_WRONG), torch.ones_like(wrong).bool())


def in_range(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where rows of this size are judged: beyond a quarter of the dtype's range a result may overflow by itself."""
    return torch.isfinite(size) & (size < torch.finfo(dtype).max / 4)


class Signs:
    """What checks share: random signs, the rows whose turn it is, and what was read with these signs last.

    The signs are drawn once for each length and device from a generator of our own. They are scaled by a power of two near
    ``length ** -0.5``, so that a weighted sum is about as large as one element and does not overflow where the elements do not;
    a power of two rounds nothing.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._kept: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}
        self._turn = 0
        self.last = LastReading()

    def turn(self, one_in: int) -> slice:
        """Return which rows of a large result are read on this step: one in so many, others on the next."""
        return slice(self._turn % one_in, None, one_in)

    def next_step(self) -> None:
        """Let other rows have their turn."""
        self._turn += 1

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


Named = dict[str, Any]
"""A call's arguments by the names of its operator's schema."""
Check = Callable[[OpCall, Named, Signs], "list[Invariant] | None"]
"""Checks one call, after it ran; None where it cannot."""
