"""Random roundings of a float64 tensor: of what a kernel reads, and of what it leaves in a narrower dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwitness.numerics import unit_roundoff

_RANGES = {
    dtype: (torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
}
"""Largest and smallest positive number of a dtype that is narrower than float64."""


class Noise:
    """Draws roundings from a generator. What is 0 or 1 all over, a mask, stays: others may rely on it."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def moved(self, value: Tensor, share: float) -> Tensor:
        """Return a tensor with each element off by up to ``share`` of itself."""
        if value.layout is not torch.strided or _is_mask(value):
            return value
        if value.is_complex():
            return torch.view_as_complex(self.moved(torch.view_as_real(value.resolve_conj()), share))
        return _laid_out_as(value, torch.where(value.isfinite(), value * (1 + share * self.signs(value)), value))

    def rounded(self, value: Tensor, kept: torch.dtype) -> Tensor:
        """Return a tensor with each element off by up to a rounding of ``kept``, infinite beyond its range."""
        if kept not in _RANGES or value.layout is not torch.strided or _is_mask(value):
            return value.clone()  # another tensor than its clean one
        if value.is_complex():
            return torch.view_as_complex(self.rounded(torch.view_as_real(value.resolve_conj()), kept))
        largest, least = _RANGES[kept]
        room = (value.abs() * unit_roundoff(kept)).clamp_min(least / 2).masked_fill(value == 0, 0.0)
        moved = torch.where(value.isfinite(), value + self.signs(value) * room, value)
        return _laid_out_as(
            value, moved.masked_fill(moved > largest, torch.inf).masked_fill(moved < -largest, -torch.inf)
        )

    def signs(self, value: Tensor) -> Tensor:
        """Return uniform numbers from -1 to 1, one for each element."""
        return torch.empty_like(value, dtype=torch.float64).uniform_(-1.0, 1.0, generator=self._generator)


def _laid_out_as(one: Tensor, other: Tensor) -> Tensor:
    """Return ``other`` with the strides of ``one``: what comes after may view it."""
    return other if other.stride() == one.stride() else torch.empty_like(one).copy_(other)


def _is_mask(tensor: Tensor) -> bool:
    """Whether all is 0 or 1: no rounding moves these, and others may rely on it."""
    return bool(((tensor == 0) | (tensor == 1)).all())
