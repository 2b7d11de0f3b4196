"""The checksum of a matrix product: ``C w = A (B w)`` for random signs ``w``, within what rounding explains.

Huang and Abraham, "Algorithm-based fault tolerance for matrix operations" (1984), with weights that a permuted or
duplicated tile cannot pass, and a threshold from the rounding errors themselves. Signs that are independent of the
data make the errors of one row add up as ``w . e``, of variance ``|w|^2 ||e||^2`` whatever their correlation.

A gradient that the next product reads, too, is read once for both; see `lastreading`.

In bfloat16, N is split in up to G = 8 blocks with a checksum each: the threshold grows with a block's norm, and the
columns ``B w`` of all blocks go through one product with A, which reads A once whatever their number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitwitness.numerics import summing_dtype, unit_roundoff
from bitwitness.oracle.limits import (
    ACCUMULATION,
    PARTS,
    ROUNDING,
    accumulation_roundoff,
    factor_roundoff,
    parts_roundoff,
)
from bitwitness.oracle.product import Product
from bitwitness.sense.invariant import Invariant, Signs, largest
from bitwitness.sense.lastreading import RowReading
from bitwitness.sense.matrixreading import (
    frobenius,
    is_transposed,
    norms_of,
    product_with,
    row_norms,
    times,
    times_wide,
)
from bitwitness.stats.products import products, several

SERIAL = 0.25
"""What a nearly serial sum of K equal terms leaves, in units of K u32 times its value: 0.14 were seen, 207 u for K = 1,500."""
# Blocks of columns with a checksum each, at most: thresholds shrink with the square root of their number, while the product
# that checks them has two columns for each.
_BLOCKS = 8
# Columns in a block, at least: narrower ones would cost more than the threshold gains.
_BLOCK_WIDTH = 128
_SUMMED_IN = 8
"""Parts in which a sum is followed that a device adds up in parts: how large it is meanwhile, in the middle of the square."""
_LISTS = 4
"""Lists of signs from which that size is taken."""


def check_product(product: Product, signs: Signs, *, is_backward: bool = False) -> Invariant | None:
    """Compare ``out w`` with ``alpha a (b w) + beta bias w``, row by row and block by block, on the product's device.

    Returns None for an empty product. A row is judged where its inputs are finite and small enough not to overflow. All
    quantities have the shape ``[*batch, M, G]``. ``is_backward``: a is a gradient, which may be read again next.
    """
    out = product.out
    if not out.numel():
        return None
    blocks = blocks_of(out)
    # Our own sums shall round no more than the product's: a half type is summed in float32.
    wide = summing_dtype(out.dtype)
    w = signs(int(out.shape[-1]) // blocks, out.device, wide)
    expected, size, running = _expected(product, w, blocks, signs, is_backward)
    if product.alpha != 1:
        expected, size, running = expected * product.alpha, size * abs(product.alpha), running * abs(product.alpha)
    if product.bias is not None:
        bias_w, bias_size = _bias(product.bias, w, blocks)
        expected, size = expected + product.beta * bias_w, size + abs(product.beta) * bias_size
    sums, norms = _row_sums(out, w, blocks)
    # A wrong C shall not widen its own threshold without bound, nor a large one lose it: ||A_m|| ||B|| bounds a right one.
    norms = torch.where(norms < math.inf, norms, size)  # nor NaN, of which nothing is true
    residual = (sums - expected).abs_()
    threshold = row_threshold(product, norms, size, expected) + running
    judged = (threshold + expected).abs_() < math.inf
    if out.dtype is not torch.float16:
        return largest("C w = A (B w)", residual, threshold, judged, per_row=blocks)
    reach = size >= torch.finfo(torch.float16).max  # a true bound of each element: below it, none can overflow
    overflowed = judged & reach & ~torch.isfinite(residual)
    return largest("C w = A (B w)", residual, threshold, judged & ~overflowed, overflowed.any(-1))


def _expected(
    product: Product, w: Tensor, blocks: int, signs: Signs, is_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``a (b w)`` and ``||a_m|| ||b||``, ``[*batch, M, G]``, and what is lost of C where a device adds up in parts.

    In a half type that is relative to what was added up so far, which may be much more than comes of it: it is added up in
    parts here, too, and its size taken from several lists of signs, of which one alone may find next to nothing.
    """
    a, b, parts = product.a, product.b, parts_roundoff(product.out, int(product.a.shape[-1]))
    known = signs.last.of(b) if blocks == 1 else None
    if known is None:
        v, size = _block_sums(b, w, blocks)
    else:
        v, size = known.sums[:, None], torch.linalg.vector_norm(known.norms)[None, None]
    if not parts or a.shape[-1] % _SUMMED_IN:
        # float32's products alone are checked by one vector, and rounded alike by rows and by columns
        read_again = is_backward and known is None and a.dtype is torch.float32 and a.dim() == 2 and a.stride(1) == 1
        sums, norms = _times_and_kept(a, v, signs) if read_again else times(a, v)
        return sums, norms[..., None] * size, w.new_zeros(())
    v = torch.cat([v, *(_block_sums(b, w.roll(shift), blocks)[0] for shift in range(1, _LISTS))], -1)
    left, right = a.unflatten(-1, (_SUMMED_IN, -1)).movedim(-2, 0), v.unflatten(-2, (_SUMMED_IN, -1)).movedim(-3, 0)
    so_far = product_with(left, right).cumsum(0).unflatten(-1, (_LISTS, -1))
    running = so_far.square().mean((0, -2)).sqrt_().mul_(PARTS * parts)
    return so_far[-1][..., 0, :], row_norms(a)[..., None] * size, running


def _times_and_kept(a: Tensor, v: Tensor, signs: Signs) -> tuple[Tensor, Tensor]:
    """Return what `times` does for one vector; what a's own signs give is taken beside it, and kept for who reads a next."""
    own = signs(int(a.shape[-1]), a.device, v.dtype)
    found = several(a, torch.cat([v, own[:, None]], -1))
    if found is None:
        return times(a, v)
    norms = norms_of(found[1], len(own))
    signs.last.keep(a, RowReading(found[0][:, 1], norms))
    return found[0][:, :1], norms


def blocks_of(out: Tensor) -> int:
    """Return into how many blocks of equal width the columns are split: a power of two up to 8, in bfloat16 only."""
    blocks = _BLOCKS if out.dtype is torch.bfloat16 else 1
    columns = int(out.shape[-1])
    while blocks > 1 and (columns % blocks or columns // blocks < _BLOCK_WIDTH):
        blocks //= 2
    return blocks


def row_threshold(product: Product, norms: Tensor, size: Tensor, expected: Tensor) -> Tensor:
    """Return the largest healthy residual, for weights of magnitude `Signs.scale`; all tensors ``[*batch, M, G]``.

    Parameters
    ----------
    product
        Gives dtypes, device and lengths.
    norms
        ``||C_m||_2`` of each block.
    size
        ``||A_m||_2 ||B||_F`` of each block, bias included.
    expected
        ``A (B w)`` of each block, bias included.

    """
    out = product.out
    inner, columns = int(product.a.shape[-1]), int(out.shape[-1]) // int(norms.shape[-1])
    info = torch.finfo(out.dtype)
    u, u_sum = unit_roundoff(out.dtype), accumulation_roundoff(out.dtype)
    scale = Signs.scale(columns)
    # A serial sum of n terms of one sign loses up to sqrt(n / 3) u of its value. Sums of random signs lose some u
    # ||A_m|| ||B||, and our own over the N columns sqrt(N) times a small part of that.
    by_norm = ROUNDING * u + ACCUMULATION * u_sum * math.sqrt(inner + columns) + PARTS * parts_roundoff(out, inner)
    by_size = ACCUMULATION * (u_sum * (1 + math.sqrt(columns) / 32) + factor_roundoff(out))
    if columns == 1 and u > u_sum:
        by_size += ROUNDING * u  # a half type's product with a vector rounds its parts on their own, bias and all
    by_value = 0.0
    if product.a.dtype is torch.bfloat16:
        # `_row_sums` and `product_with` round, each by at most u; the low part u times less
        by_size += u * u
        by_value = 2 * u
    if columns == 1 or product.a.shape[-2] == 1:
        # A product with a vector is summed nearly serially; equal terms then round the same way each time, and the errors of
        # n terms grow with n.
        by_value += SERIAL * u_sum * inner
    floor = ROUNDING * (u * info.smallest_normal + (inner + columns) * torch.finfo(torch.float32).tiny)
    threshold = (scale * by_norm) * norms + floor
    threshold.add_(size, alpha=scale * by_size)
    return threshold.add_(expected.abs(), alpha=by_value) if by_value else threshold


def _row_sums(out: Tensor, w: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return ``out w`` of each block, and the blocks' norms, ``[*batch, M, G]``."""
    found = _read(out, w, blocks)
    if found is not None:
        return found[0], norms_of(found[1], len(w))
    norms = row_norms(out.unflatten(-1, (blocks, -1)) if blocks > 1 else out.unsqueeze(-2))
    if out.dtype is not torch.bfloat16:
        return times_wide(out, w[:, None]), norms
    column = w[:, None].to(torch.bfloat16)  # exact; the sums are rounded
    return torch.matmul(out.unflatten(-1, (blocks, -1)), column).squeeze(-1).to(w.dtype), norms


def _block_sums(b: Tensor, w: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return ``b w`` of each block, ``[*batch, K, G]``, rounding nothing to less than w, and the norms, ``[*batch, 1, G]``."""
    found = _read(b, w, blocks)
    if found is not None:
        return found[0], norms_of(found[1].sum(-2, keepdim=True), int(b.shape[-2]) * len(w))
    norms = _block_norms(b, blocks)
    if blocks == 1:
        return times_wide(b, w[:, None]), norms
    if is_transposed(b):
        parts = b.t().unflatten(0, (blocks, -1))
        return torch.stack([times_wide(part.t(), w[:, None]).squeeze(-1) for part in parts], -1), norms
    return times_wide(b.unflatten(-1, (blocks, -1)), w[:, None]).squeeze(-1), norms


def _read(x: Tensor, w: Tensor, blocks: int) -> tuple[Tensor, Tensor] | None:
    """Return ``x w`` of each block and the squares of its rows, ``[*batch, M, G]``; None where `products` does not take x."""
    if blocks == 1:
        found = products(x, w)
        return None if found is None else (found[0][..., None], found[1][..., None])
    if x.dim() != 2:
        return None
    if not is_transposed(x):
        return products(x.unflatten(-1, (blocks, -1)), w)
    found = products(x.t().unflatten(0, (blocks, -1)).mT, w)
    return None if found is None else (found[0].t(), found[1].t())


def _block_norms(b: Tensor, blocks: int) -> Tensor:
    """Return the Frobenius norm of each block of b's columns, ``[*batch, 1, G]``."""
    if blocks == 1:
        whole: Tensor = frobenius(b)[..., None, None]
        return whole
    if is_transposed(b):
        each: Tensor = frobenius(b.t().unflatten(0, (blocks, -1)))[None]
        return each
    rows = row_norms(b.unflatten(-1, (blocks, -1)))
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-2, keepdim=True)
    return norms


def _bias(bias: Tensor, w: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return ``bias w`` and its norms of each block, broadcastable to ``[*batch, M, G]``, reading each number once."""
    if bias.stride(-2) == 0:
        bias = bias[..., :1, :]
    if bias.stride(-1) == 0:
        column = bias[..., :1].to(w.dtype)
        return column * w.sum(), column.abs() * math.sqrt(len(w))
    parts = bias.to(w.dtype).unflatten(-1, (blocks, -1))
    return torch.matmul(parts, w), torch.linalg.vector_norm(parts, dim=-1)
