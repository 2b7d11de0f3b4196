"""The checksum of a matrix product: ``C w = A (B w)`` for random signs ``w``, within what rounding explains.

Huang and Abraham, "Algorithm-based fault tolerance for matrix operations" (1984), with weights that a permuted or
duplicated tile cannot pass, and a threshold from the rounding errors themselves. Signs that are independent of the
data make the errors of one row add up as ``w . e``, of variance ``|w|^2 ||e||^2`` whatever their correlation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.numerics import unit_roundoff
from bitwitness.sense.invariant import Invariant, Signs, largest
from bitwitness.tap.operators import OpCall

ROUNDING = 3.0
"""Rounding of C, in units of u ||C_m||: independent roundings give sigma = 0.41, so 7 sigma; see bench/checksum_cost.py."""
ACCUMULATION = 4.0
"""What the order of summation leaves, in units of u32 (||A_m|| ||B|| + sqrt(K + N) ||C_m||); see bench/checksum_cost.py."""
_UNDERFLOW = 2.0**-63
"""float32 loses the square of what is smaller; n such elements add up to no more than sqrt(n) times this."""
_CHUNK = 1 << 19  # elements that are widened at a time: 2 MiB of float32, which stay in a core's cache
_CHUNK_DEVICE = 1 << 26  # an accelerator wants few, large kernels


@dataclass(frozen=True, slots=True)
class Product:
    """``out = alpha a @ b + beta bias``: a ``[*batch, M, K]``, b ``[*batch, K, N]``, out ``[*batch, M, N]``, strided.

    ``bias`` is expanded to out's shape, or None.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    bias: Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0

    @property
    def flops(self) -> int:
        """2 M N K, over the batch."""
        return 2 * self.out.numel() * int(self.a.shape[-1])


def _plain(call: OpCall) -> Product:
    return Product(call.args[0], call.args[1], call.result)


def _vector(call: OpCall) -> Product:
    return Product(call.args[0], call.args[1].unsqueeze(-1), call.result.unsqueeze(-1))


def _biased(call: OpCall) -> Product:
    bias, a, b = call.args[:3]
    return _with_bias(call, a, b, call.result, bias)


def _biased_vector(call: OpCall) -> Product:
    bias, a, b = call.args[:3]
    return _with_bias(call, a, b.unsqueeze(-1), call.result.unsqueeze(-1), bias.unsqueeze(-1))


def _summed_batch(call: OpCall) -> Product:
    bias, a, b = call.args[:3]
    return _with_bias(call, a.transpose(0, 1).flatten(1), b.flatten(0, 1), call.result, bias)


def _with_bias(call: OpCall, a: Tensor, b: Tensor, out: Tensor, bias: Tensor) -> Product:
    alpha, beta = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1)
    if beta == 0:  # then the bias is not read, and may be NaN
        return Product(a, b, out, None, alpha)
    return Product(a, b, out, bias.expand(out.shape), alpha, beta)


READERS: dict[str, Callable[[OpCall], Product]] = {
    "mm": _plain,
    "bmm": _plain,
    "mv": _vector,
    "addmm": _biased,
    "baddbmm": _biased,
    "addmv": _biased_vector,
    "addbmm": _summed_batch,
}
"""How each matrix product's call is read, by operator."""


def product_of(call: OpCall) -> Product | None:
    """Read a call of one of `READERS`; None where it cannot be checked: other layouts, dtypes, ``out=``."""
    if call.func._schema.is_mutable:
        return None
    product = READERS[call.op](call)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    checkable = all(t.layout is torch.strided and t.dtype in dtypes for t in (product.a, product.b, product.out))
    return product if checkable and product.out.device.type != "meta" else None


def check_product(product: Product, signs: Signs) -> Invariant | None:
    """Compare ``out w`` with ``alpha a (b w) + beta bias w``, row by row, on the product's device.

    Returns None for an empty product. A row is judged where its inputs are finite and small enough not to overflow.
    """
    a, b, out = product.a, product.b, product.out
    if not out.numel():
        return None
    columns = int(out.shape[-1])
    wide = torch.float64 if out.dtype is torch.float64 else torch.float32
    w = signs(columns, out.device, wide)
    expected = _gemv(a, _gemv_wide(b, w))
    size = row_norms(a) * frobenius(b)[..., None]
    if product.alpha != 1:
        expected, size = expected * product.alpha, size * abs(product.alpha)
    if product.bias is not None:
        bias_w, bias_size = _bias(product.bias, w)
        expected, size = expected + product.beta * bias_w, size + abs(product.beta) * bias_size
    norms = row_norms(out)
    residual = (_gemv(out, w, exact_weights=True) - expected).abs()
    threshold = row_threshold(product, norms, size, expected)
    judged = torch.isfinite(expected) & torch.isfinite(size)
    if out.dtype is not torch.float16:
        return largest("C w = A (B w)", residual, threshold, judged)
    reach = size >= torch.finfo(torch.float16).max  # a true bound of each element: below it, none can overflow
    lawful = judged & reach & ~torch.isfinite(residual)
    return largest("C w = A (B w)", residual, threshold, judged & ~lawful, lawful)


def row_threshold(product: Product, norms: Tensor, size: Tensor, expected: Tensor) -> Tensor:
    """Return the largest innocent residual of each row, for weights of magnitude `Signs.scale`.

    Parameters
    ----------
    product
        Gives dtypes, device and lengths.
    norms
        ``||C_m||_2``, float ``[*batch, M]``.
    size
        ``||A_m||_2 ||B||_F`` (bias included), float ``[*batch, M]``.
    expected
        ``A (B w)`` (bias included), float ``[*batch, M]``.

    """
    out = product.out
    inner, columns = int(product.a.shape[-1]), int(out.shape[-1])
    info = torch.finfo(out.dtype)
    u, u_sum = unit_roundoff(out.dtype), unit_roundoff(torch.float64 if out.dtype is torch.float64 else torch.float32)
    scale = Signs.scale(columns)
    # A serial sum of n terms of one sign loses up to sqrt(n / 3) u of its value. Sums of random signs lose some u
    # ||A_m|| ||B||, and our own over the N columns sqrt(N) times a small part of that.
    summed = u_sum * (size * (1 + math.sqrt(columns) / 32) + math.sqrt(inner + columns) * norms)
    summed = ACCUMULATION * (summed + factor_roundoff(out) * size)
    floor = ROUNDING * (u * info.smallest_normal + (inner + columns) * torch.finfo(torch.float32).tiny)
    threshold = scale * (ROUNDING * u * norms + summed) + floor
    if product.a.dtype is torch.bfloat16:  # `_gemv` rounds C w and A hi, each by at most u, and A mid, u times smaller
        threshold = threshold + 2 * u * expected.abs() + scale * u * u * size
    return threshold


def factor_roundoff(out: Tensor) -> float:
    """Return the unit roundoff to which torch may round a float32 product's factors on ``out``'s device (TF32, bfloat16)."""
    if out.dtype is not torch.float32:
        return 0.0
    backend = torch.backends.cuda if out.device.type == "cuda" else torch.backends.mkldnn
    allowed = getattr(backend.matmul, "fp32_precision", "ieee")
    return {"tf32": 2.0**-11, "bf16": unit_roundoff(torch.bfloat16)}.get(str(allowed), 0.0)


def _gemv(x: Tensor, v: Tensor, *, exact_weights: bool = False) -> Tensor:
    """Return ``x @ v`` in v's dtype: x ``[*batch, M, K]``, v ``[K]`` or ``[*batch, K]``.

    bfloat16 is multiplied as it is, eight times faster than widened: v is split in three bfloat16 parts that together
    hold its 24 bits (``exact_weights``: v is one already), so that only the results are rounded.
    """
    if x.dtype is not torch.bfloat16:
        return _gemv_wide(x, v)
    parts = [v.to(torch.bfloat16)]
    for _ in range(0 if exact_weights else 2):
        v = v - parts[-1]
        parts.append(v.to(torch.bfloat16))
    columns = torch.stack(parts, -1)
    if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1:
        return (columns.t() @ x.t()).sum(0, dtype=torch.float32)  # the fast order for a transposed view
    return torch.matmul(x, columns).sum(-1, dtype=torch.float32)


def _gemv_wide(x: Tensor, v: Tensor) -> Tensor:
    """Return ``x @ v`` computed in v's dtype; x is widened a part at a time, which bounds the memory that takes."""
    column = v.unsqueeze(-1)
    if x.dtype is v.dtype:
        return torch.matmul(x, column).squeeze(-1) if x.dim() > 2 or v.dim() > 1 else torch.mv(x, v)
    length = _part(x)
    if x.shape[0] <= length:
        return torch.matmul(x.to(v.dtype), column).squeeze(-1)
    columns = column.split(length) if v.dim() > 1 else [column] * -(-x.shape[0] // length)
    parts = [torch.matmul(part.to(v.dtype), c) for part, c in zip(x.split(length), columns, strict=True)]
    return torch.cat(parts).squeeze(-1)


def _part(x: Tensor) -> int:
    """Return how many slices of x's first dimension are widened at a time."""
    chunk = _CHUNK if x.device.type == "cpu" else _CHUNK_DEVICE
    return max(1, chunk * x.shape[0] // max(x.numel(), 1))


def frobenius(x: Tensor) -> Tensor:
    """Return an upper bound of the Frobenius norm of each matrix, tight but for `_UNDERFLOW`, float32 or 64 ``[*batch]``."""
    norm = torch.linalg.vector_norm(_unless_half(x), dim=None if x.dim() == 2 else (-2, -1))
    return _wide(norm) + _UNDERFLOW * math.sqrt(x.shape[-2] * x.shape[-1])


def row_norms(x: Tensor) -> Tensor:
    """Return an upper bound of the 2-norm of each row, float32 or float64 ``[*batch, M]``.

    It is tight but for `_UNDERFLOW` and for one case: a reduction across memory is slow, so the rows of a transposed matrix
    are squared and summed as a matrix product, or in low precision, where the figure hardly matters, bounded by the norm of
    the whole.
    """
    if x.dim() > 2 or x.stride(1) == 1 or x.stride(0) != 1 or x.shape[0] == 1:
        norms = _wide(torch.linalg.vector_norm(_unless_half(x), dim=-1))
    elif x.dtype in (torch.float32, torch.float64):
        norms = _norms_across(x.t())
    else:
        return frobenius(x).expand(x.shape[0])
    return norms + _UNDERFLOW * math.sqrt(x.shape[-1])


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


def _bias(bias: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``bias w`` and the norms of bias's rows, both broadcastable to ``[*batch, M]``, reading each number once."""
    if bias.stride(-2) == 0:
        bias = bias[..., :1, :]
    if bias.stride(-1) == 0:
        column = bias[..., 0].to(w.dtype)
        return column * w.sum(), column.abs() * math.sqrt(len(w))
    bias = bias.to(w.dtype)
    return torch.matmul(bias, w), torch.linalg.vector_norm(bias, dim=-1)
