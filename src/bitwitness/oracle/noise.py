"""Random roundings of a float64 tensor: of what a kernel reads, and of what it leaves in a narrower dtype."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import is_inexact, smallest_number, unit_roundoff
from bitwitness.oracle.float64 import each_argument

_RANGES = {
    dtype: (torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal, smallest_number(dtype))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""Largest, smallest normal and smallest positive number of a dtype."""

_SALTS, _MANTISSA, _LOST = 1 << 62, 52, 40
_FACTORS = -7046029254386353131, -4658895280553007687


class Noise:
    """Draws roundings from a generator. What is 0 or 1 all over, a mask, stays: others may rely on it."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        seed = generator.initial_seed()
        self._pair, self._side = torch.Generator().manual_seed((seed + 1) // 2), 1.0 if seed % 2 else -1.0

    def moved(self, value: Tensor, share: float) -> Tensor:
        """Return a tensor with each element off by up to ``share`` of itself."""
        if value.layout is not torch.strided or is_mask(value):
            return value
        if value.is_complex():
            return torch.view_as_complex(self.moved(torch.view_as_real(value.resolve_conj()), share))
        moved = (value * self.signs(value, share)).add_(value)
        if not bool(moved.isfinite().all()):
            moved = torch.where(value.isfinite(), moved, value)
        return _laid_out_as(value, moved)

    def moved_by_largest(self, value: Tensor, share: float) -> Tensor:
        """Return a tensor with each element off by up to ``share`` of the largest magnitude in it."""
        if value.is_complex():
            parts = torch.view_as_real(value.resolve_conj())
            return torch.view_as_complex(self.moved_by_largest(parts, share))
        return value + self.signs(value, share) * value.abs().nan_to_num(0.0, 0.0, 0.0).max()

    def arguments(self, values: Any, share: float) -> Any:
        """Return arguments with each floating number and tensor among them off by up to ``share`` of itself."""

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self.moved(value, share) if is_inexact(value) else value
            return self.number(value, share) if isinstance(value, float) else value

        return each_argument(values, moved)

    def number(self, value: float, share: float) -> float:
        """Return a number that kernels read in float32, off by as much, where that does not hold it."""
        held = not math.isfinite(value) or float(torch.tensor(value, dtype=torch.float32)) == value
        return value if held else value * (1 + float(self.signs(torch.tensor(value, dtype=torch.float64), share)))

    def rounded(self, value: Tensor, kept: torch.dtype) -> Tensor:
        """Return a tensor with each element off by up to a rounding of ``kept``, infinite beyond its range."""
        if kept not in _RANGES or value.layout is not torch.strided or is_mask(value):
            return value.clone()  # another tensor than its clean one
        if value.is_complex():
            return torch.view_as_complex(self.rounded(torch.view_as_real(value.resolve_conj()), kept))
        largest, normal, least = _RANGES[kept]
        size, share = value.abs(), unit_roundoff(kept)
        if not float(size.amax() if size.numel() else 0.0) < largest / 2 or bool(((size < normal) & (size > 0)).any()):
            room = (size * share).clamp_min(least / 2).masked_fill(value == 0, 0.0)
            moved = torch.where(value.isfinite(), value + self.signs(value, 1.0) * room, value)
            moved = moved.masked_fill(moved > largest, torch.inf).masked_fill(moved < -largest, -torch.inf)
        else:
            moved = (value * self.signs(value, share)).add_(value)
        return _laid_out_as(value, moved)

    def sides(self, value: Tensor) -> Tensor:
        """Return 1 or -1 for each element; of two generators whose seeds are 2 n - 1 and 2 n the opposite: both are seen."""
        drawn = torch.empty_like(value, dtype=torch.float32).uniform_(-1.0, 1.0, generator=self._pair)
        return torch.where(drawn < 0, -self._side, self._side)

    def signs(self, value: Tensor, share: float) -> Tensor:
        """Return uniform numbers from ``-share`` to ``share``, one for each element; float32, which suffices for noise.

        As a kernel rounds equal numbers alike, and neighbours nearly so, what many elements share does not average out: the
        numbers within one step of 2 ``share`` are off by what depends on where in it they lie, and each step begins elsewhere.
        Where is a hash of the step, with a salt of each call's own (the finaliser of MurmurHash3, with 64-bit factors).
        """
        salt = int(torch.randint(_SALTS, (), generator=self._generator))
        bits = value.double().view(torch.int64)
        within = min(max(_MANTISSA + 1 + math.ceil(math.log2(share)), 1), _MANTISSA) if share else 1
        begins = (bits >> within).bitwise_xor_(salt).mul_(_FACTORS[0])
        begins.bitwise_xor_(begins >> 32).mul_(_FACTORS[1])
        where = begins.add_(bits << (64 - within)).bitwise_right_shift_(_LOST)
        return where.to(torch.float32).mul_(share * 2.0 ** (_LOST - 63))


def _laid_out_as(one: Tensor, other: Tensor) -> Tensor:
    """Return ``other`` with the strides of ``one``: what comes after may view it."""
    return other if other.stride() == one.stride() else torch.empty_like(one).copy_(other)


def is_mask(tensor: Tensor) -> bool:
    """Whether all is 0 or 1: no rounding moves these, and others may rely on it."""
    if not tensor.numel() or tensor[(0,) * tensor.dim()].item() not in (0.0, 1.0):  # the first one tells most
        return not tensor.numel()
    return bool(((tensor == 0) | (tensor == 1)).all())
