"""What a checksum needs of a matrix, each value fetched from memory once, where the compiled reader takes it.

A product with a vector, and the squares beside it: torch reads the matrix for either, and squares the rows of a transposed
one at a tenth of memory's pace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwitness.numerics import summing_dtype
from bitwitness.stats.local import is_torchs_own
from bitwitness.stats.reader import Reader, built


def products(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return ``x v`` and the squares of x's rows, both ``[*batch, M]``, in float32 (in float64 for a float64).

    Parameters
    ----------
    x
        ``[M, K]`` or ``[batch, M, K]``, of float16, bfloat16, float32 or float64; what a half type holds is not rounded.
    v
        ``[K]`` for all matrices alike, or ``[batch, K]``.

    Returns
    -------
        None where the compiled reader does not take x: it lies on an accelerator, or in strides, or nothing was compiled.

    """
    reader = _reader_of(x)
    if reader is None or x.dim() not in (2, 3) or v.dtype is not summing_dtype(x.dtype):
        return None
    sums, squares = v.new_empty(x.shape[:-1]), v.new_empty(x.shape[:-1])
    reader.products(x if x.dim() == 3 else x[None], v.contiguous(), sums, squares)
    return sums, squares


def several(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return ``x v`` ``[M, G]`` for v ``[K, G]``, and the squares of x's rows, ``[M]``, in float32; None as `products`.

    x is a matrix of bfloat16 or float32; G is 2 or 4, or 8 where x is contiguous along its rows.
    """
    reader = _reader_of(x)
    if reader is None or x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float32):
        return None
    by_rows, groups = x.stride(1) == 1, int(v.shape[1])
    if v.dtype is not torch.float32 or not v.is_cpu or groups not in ((2, 4, 8) if by_rows else (2, 4)):
        return None
    sums = v.new_empty((x.shape[0], groups) if by_rows else (groups, x.shape[0]))
    squares = v.new_empty(x.shape[0])
    reader.many(x, v.t().contiguous() if by_rows else v.contiguous(), sums, squares)
    return sums if by_rows else sums.t(), squares


def _reader_of(x: Tensor) -> Reader | None:
    """Return the compiled reader, where it takes a matrix that lies in memory by its rows or by its columns."""
    reader = built()
    if reader is None or x.dim() < 2 or not is_torchs_own(x) or not reader.reaches(x):
        return None
    return reader if 1 in (x.stride(-1), x.stride(-2)) else None


def pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the dot products of the rows of two tensors ``[a, b, c, K]``, and the squares of either, ``[a, b, c]`` each.

    As `products` does, in float32 (in float64 for a float64); None where the compiled reader does not take them.
    """
    reader = built()
    if reader is None or x.dim() != 4 or x.shape != y.shape or x.dtype is not y.dtype:
        return None
    if not all(is_torchs_own(t) and reader.reaches(t) and t.stride(-1) == 1 for t in (x, y)):
        return None
    out = x.new_empty((3, *x.shape[:-1]), dtype=summing_dtype(x.dtype))
    reader.pairs(x, y, out)
    return out[0], out[1], out[2]
