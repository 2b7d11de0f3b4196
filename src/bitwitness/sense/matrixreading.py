"""What checksums read of a matrix: its product with a few vectors, and the norms of its rows; each once, where that can be.

Half types are widened a part at a time, or multiplied as they are, by a vector that is split in two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitwitness.numerics import summing_dtype
from bitwitness.stats.products import pairs, products, several

UNDERFLOW = 2.0**-63
"""float32 loses the square of what is smaller; n such elements add up to no more than sqrt(n) times this."""
_CHUNK = 1 << 19  # elements that are widened at a time: 2 MiB of float32, which stay in a core's cache
_CHUNK_DEVICE = 1 << 26  # an accelerator wants few, large kernels: 256 MiB of float32


def times(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``a @ v`` in v's dtype, ``[*batch, M, G]``, and the norms of a's rows, for v ``[*batch, K, G]``."""
    if v.shape[-1] == 1:
        alone = products(a, v[..., 0])
        found = None if alone is None else (alone[0][..., None], alone[1])
    else:
        found = several(a, v)
    if found is None:
        return product_with(a, v), row_norms(a)
    return found[0], norms_of(found[1], int(a.shape[-1]))


def paired(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the dot products of two tensors' rows, ``[a, b, c]`` of ``[a, b, c, K]``, and upper bounds of either's norms."""
    found = pairs(x, y)
    if found is None:
        wide = summing_dtype(x.dtype)
        return (x.to(wide) * y.to(wide)).sum(-1), row_norms(x), row_norms(y)
    dots, *squares = found
    left, right = (norms_of(square, int(x.shape[-1])) for square in squares)
    return dots, left, right


def norms_of(squares: Tensor, count: int) -> Tensor:
    """Return upper bounds of the norms of so many numbers each, of the sums of their squares."""
    return squares.sqrt_().add_(UNDERFLOW * math.sqrt(count))


def product_with(a: Tensor, v: Tensor) -> Tensor:
    """Return ``a @ v`` in v's dtype.

    bfloat16 is multiplied as it is, which reads it once and widens nothing: v is split in two bfloat16 parts that hold 16 of
    its 24 bits, and the two products are rounded.
    """
    if a.dtype is not torch.bfloat16:
        return times_wide(a, v)
    high, columns = v.to(torch.bfloat16), int(v.shape[-1])
    both = torch.cat([high, (v - high).to(torch.bfloat16)], -1)
    each = torch.matmul(both.mT, a.mT).mT  # a few long rows: the fast order, however a lies in memory
    sums: Tensor = each[..., :columns].to(v.dtype).add_(each[..., columns:])
    return sums


def times_wide(x: Tensor, v: Tensor) -> Tensor:
    """Return ``x @ v`` in v's dtype; x is widened a part at a time, which bounds the memory that takes."""
    if x.dtype is v.dtype:
        return torch.matmul(x, v)
    length = _part(x)
    if x.shape[0] <= length:
        return torch.matmul(x.to(v.dtype), v)
    factors = [v] * -(-x.shape[0] // length) if v.dim() < x.dim() or v.dim() == 2 else list(v.split(length))
    return torch.cat([torch.matmul(part.to(v.dtype), f) for part, f in zip(x.split(length), factors, strict=True)])


def is_transposed(x: Tensor) -> bool:
    """Tell whether a matrix lies in memory by its columns."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1


def _part(x: Tensor) -> int:
    """Return how many slices of x's first dimension are widened at a time."""
    chunk = _CHUNK if x.device.type == "cpu" else _CHUNK_DEVICE
    return max(1, chunk * x.shape[0] // max(x.numel(), 1))


def frobenius(x: Tensor) -> Tensor:
    """Return an upper bound of the Frobenius norm of each matrix, tight but for `UNDERFLOW`, float32 or 64 ``[*batch]``."""
    norm = torch.linalg.vector_norm(_unless_half(x), dim=None if x.dim() == 2 else (-2, -1))
    return _wide(norm) + UNDERFLOW * math.sqrt(x.shape[-2] * x.shape[-1])


def row_norms(x: Tensor) -> Tensor:
    """Return an upper bound of the 2-norm of each row, float32 or float64 ``[*batch, M]``.

    It is tight but for `UNDERFLOW` and for one case: a reduction across memory is slow, so the rows of a transposed matrix
    are squared and summed as a matrix product, or in low precision, where the figure hardly matters, bounded by the norm of
    the whole.
    """
    if not is_transposed(x) or x.shape[0] == 1:
        norms = _wide(torch.linalg.vector_norm(_unless_half(x), dim=-1))
    elif x.dtype in (torch.float32, torch.float64):
        norms = _norms_across(x.t())
    else:
        return frobenius(x).expand(x.shape[0])
    return norms + UNDERFLOW * math.sqrt(x.shape[-1])


def _norms_across(x: Tensor) -> Tensor:
    """Return the norms of a matrix's columns, squaring a part at a time."""
    total = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    length = _part(x)
    ones = torch.ones(min(length, x.shape[0]), dtype=x.dtype, device=x.device)
    for part in x.split(length):
        total.addmv_(part.square().t(), ones[: len(part)])
    return total.sqrt_()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _unless_half(x: Tensor) -> Tensor:
    """Widen float16, whose norms overflow."""
    return x.float() if x.dtype is torch.float16 else x
