"""One row of a matrix product in float64: which element is wrong, and what it should be."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bitwitness.numerics import unit_roundoff
from bitwitness.sense.matmul import ACCUMULATION, ROUNDING, Product, factor_roundoff


@dataclass(frozen=True, slots=True)
class Element:
    """The worst element of a row: its column, the operator's value, float64's, and whether rounding cannot explain it."""

    column: int
    value: float
    expected: float
    wrong: bool

    def as_dict(self) -> dict[str, Any]:
        """Return column, value and expected by name."""
        facts = asdict(self)
        del facts["wrong"]
        return facts


def worst_element(product: Product, row: int) -> Element:
    """Recompute the row with flat index ``row`` (over batch and M) in float64, and find its worst element.

    An element is wrong if it is off by more than its own rounding (a few u of its value) and its sum's: some
    u32 sqrt(K) |A_m| . |B_j|.
    """
    out = product.out
    batch, m = divmod(row, int(out.shape[-2]))
    a = product.a.reshape(-1, *product.a.shape[-2:])[batch, m].double()
    b = (product.b if product.b.dim() == 2 else product.b[batch]).double()
    value = out.reshape(-1, *out.shape[-2:])[batch, m].double()
    expected = product.alpha * (a @ b)
    size = abs(product.alpha) * (a.abs() @ b.abs())
    if product.bias is not None:
        bias = product.beta * product.bias.reshape(-1, *out.shape[-2:])[batch, m].double()
        expected, size = expected + bias, size + bias.abs()
    u_sum = unit_roundoff(torch.float64 if out.dtype is torch.float64 else torch.float32)
    summed = ACCUMULATION * (u_sum * math.sqrt(len(a) + 1) + factor_roundoff(out)) * size
    allowed = ROUNDING * unit_roundoff(out.dtype) * expected.abs() + summed + torch.finfo(out.dtype).smallest_normal
    excess = ((value - expected).abs() / allowed).nan_to_num(nan=math.inf)
    column = int(excess.argmax())
    return Element(column, float(value[column]), float(expected[column]), wrong=bool(excess[column] > 1))
