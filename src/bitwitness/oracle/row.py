"""One row of a matrix product in float64: which element is wrong, and what it should be."""

from __future__ import annotations

import torch

from bitwitness.oracle.limits import ACCUMULATION, ROUNDING, factor_roundoff, parts_roundoff, sum_bound
from bitwitness.oracle.product import Product
from bitwitness.oracle.worst import WorstElement, worst_element


def compare_row_with_float64(product: Product, row: int) -> WorstElement:
    """Recompute one row of a product in float64, and return its worst element.

    An element is wrong if it is off by more than its own rounding (a few u of its value) and its sum's: some
    u32 sqrt(K) |A_m| . |B_j|. Inputs and row are expected to be finite in float64.

    Parameters
    ----------
    product
        The product, with its inputs as the operator read them.
    row
        Flat index over batch and M.

    Returns
    -------
    WorstElement
        ``at`` is the column.

    """
    out = product.out
    batch, m = divmod(row, int(out.shape[-2]))
    a = product.a.reshape(-1, *product.a.shape[-2:])[batch, m].double()
    # Views all the way: only one row of A, and B of its batch, are widened.
    b = (product.b if product.b.dim() == 2 else product.b[batch]).double()
    value = out.reshape(-1, *out.shape[-2:])[batch, m].double()
    expected = product.alpha * (a @ b)
    size = abs(product.alpha) * (a.abs() @ b.abs())
    if product.bias is not None:
        bias = product.beta * product.bias.reshape(-1, *out.shape[-2:])[batch, m].double()
        expected, size = expected + bias, size + bias.abs()
    allowed = sum_bound(
        expected,
        size,
        out.dtype,
        len(a) + 1,  # the bias is a term, too
        rounding=ROUNDING,
        accumulation=ACCUMULATION,
        factors=factor_roundoff(out),
        parts=parts_roundoff(out, len(a)),
    )
    # Below the smallest normal number a result is rounded absolutely, or flushed to zero.
    return worst_element(value, expected, allowed + torch.finfo(out.dtype).smallest_normal)
