"""The reference systems' own checksum of a bfloat16 matrix product, to compare with and to be compatible with.

For C = A B with N columns, in float32: ``err_i = |sum_j C_ij - (A sum_j B_j)_i|``. Where every row's largest magnitude is
more than 5 times its mean, the tolerance is ``max|C_i| 2^-8 sqrt(N)``, otherwise ``mean|C_i| 2^-8 N``. It reads plain
products only (``mm`` and ``bmm``, or ``addmm`` less its bias), in bfloat16, and says nothing of others.

The vendors differ on NaN: one counts a row as wrong if ``err > tolerance``, which a NaN in C passes. Here the row must
satisfy ``err <= tolerance``, unless its inputs are not finite.
"""

from __future__ import annotations

import math

import torch

from bitwitness.oracle.product import Product
from bitwitness.sense.invariant import Invariant, largest

_PEAKED = 5.0  # largest magnitude over mean one, by the formula in the module's text
_U = 2.0**-8  # bfloat16's unit roundoff


def check_reference(product: Product) -> Invariant | None:
    """Return the reference's check of a product; None where it does not apply."""
    if product.out.dtype is not torch.bfloat16 or not product.out.numel():
        return None
    out = product.out.float()
    if product.bias is not None:
        out = out - product.beta * product.bias.float()
    columns = int(out.shape[-1])
    expected = product.alpha * torch.matmul(product.a.float(), product.b.float().sum(-1, keepdim=True)).squeeze(-1)
    error = (out.sum(-1) - expected).abs()
    largest_value, mean = out.abs().amax(-1), out.abs().mean(-1)
    peaked = (largest_value / mean).amin() > _PEAKED
    tolerance = torch.where(peaked, largest_value * (_U * math.sqrt(columns)), mean * (_U * columns))
    tolerance = tolerance.nan_to_num(nan=0.0, posinf=0.0) + torch.finfo(torch.float32).tiny  # 0 of 0 passes
    return largest("reference CheckSum", error, tolerance, torch.isfinite(expected))
