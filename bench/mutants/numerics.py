"""Roundings that kernels do, and shouldn't: towards zero, up, through fewer bits, and flushes of subnormals."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
HALF = (torch.bfloat16, torch.float16)


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results of this one are exact enough to be rounded once."""
    return torch.float32 if dtype in HALF else torch.float64


def widened(inputs: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the inputs, the floating ones in a wider dtype (float32 for halves, else float64)."""
    return [x.to(dtype or wider(x.dtype)) if x.is_floating_point() else x for x in inputs]


def bits(x: Tensor) -> Tensor:
    """Return the patterns, as integers of the same size."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def towards_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round towards zero."""
    near = x.to(dtype)
    beyond = (near.to(x.dtype).abs() > x.abs()).to(bits(near).dtype)
    return (bits(near) - beyond).view(dtype)


def upwards(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round towards plus infinity."""
    near = x.to(dtype)
    short = (near.to(x.dtype) < x).to(bits(near).dtype)
    return (bits(near) + torch.where(near >= 0, short, -short)).view(dtype)


def kept(x: Tensor, mantissa: int, *, truncate: bool = False) -> Tensor:
    """Keep so many of float32's 23 bits of mantissa: to nearest even, or cut."""
    drop = 23 - mantissa
    pattern = bits(x.float().contiguous())
    if not truncate:
        pattern = pattern + ((1 << (drop - 1)) - 1) + ((pattern >> drop) & 1)
    return ((pattern >> drop) << drop).view(torch.float32).to(x.dtype)


def tf32(x: Tensor) -> Tensor:
    """Round to TensorFloat-32."""
    return kept(x, 10)


def bf16(x: Tensor) -> Tensor:
    """Round to bfloat16's precision, in the tensor's dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def fp16(x: Tensor) -> Tensor:
    """Round to float16's precision and range, in the tensor's dtype."""
    return x.to(torch.float16).to(x.dtype)


def bf16_twice(x: Tensor) -> Tensor:
    """Represent by a sum of two bfloat16: 16 bits of float32's 24."""
    high = bf16(x)
    return high + bf16(x - high)


def flushed(x: Tensor) -> Tensor:
    """Flush subnormals to zero."""
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, torch.zeros_like(x), x)


def flipped(x: Tensor, element: int, bit: int) -> Tensor:
    """Flip one bit of one element."""
    out = x.contiguous().clone()
    bits(out).view(-1)[element % out.numel()] ^= 1 << bit
    return out
