"""A matrix product as its call gives it: factors, result, and what is added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.tap.operators import OpCall

_CHECKABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes with arithmetic of their own; float8 and integer products carry scales that a call does not show alike."""


@dataclass(frozen=True, slots=True)
class Product:
    """``out = alpha a @ b + beta bias``: a ``[*batch, M, K]``, b ``[*batch, K, N]``, out ``[*batch, M, N]``, strided.

    ``bias`` is expanded to out's shape, or None. ``by_columns``: this is the transpose of what the call computed.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    bias: Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0
    by_columns: bool = False

    @property
    def turned(self) -> Product:
        """The same product by its columns: ``out^T = alpha b^T @ a^T + beta bias^T``."""
        bias = None if self.bias is None else self.bias.mT
        return Product(self.b.mT, self.a.mT, self.out.mT, bias, self.alpha, self.beta, not self.by_columns)

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
    """Return a call of one of `READERS` as a product; None where it cannot be checked: other layouts, dtypes, ``out=``."""
    if call.func._schema.is_mutable:
        return None
    product = READERS[call.op](call)
    checkable = all(t.layout is torch.strided and t.dtype in _CHECKABLE for t in (product.a, product.b, product.out))
    return product if checkable and product.out.device.type != "meta" else None
