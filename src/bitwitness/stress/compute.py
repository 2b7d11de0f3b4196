"""What devices compute: matrix products, attention, reductions and element-wise functions, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from bitwitness.stress.workload import Workload, drawn, dtype_name, shape_text
from bitwitness.trial.call import Call

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int8, torch.int32)
Shapes = tuple[tuple[int, ...], ...]

_PRODUCTS: dict[bool, tuple[tuple[int, int, int], ...]] = {
    False: ((96, 64, 80), (67, 129, 95)),
    True: ((4096, 4096, 4096), (1031, 2049, 4099)),
}
_ATTENDED: dict[bool, Shapes] = {False: ((2, 2, 32, 16), (1, 3, 37, 24)), True: ((2, 8, 1024, 128), (1, 3, 1031, 72))}
_ROWS: dict[bool, Shapes] = {False: ((64, 256), (33, 191)), True: ((8192, 4096), (1031, 4099))}
"""Rows, columns and depth; batch, heads, length and width; rows and columns: of a CPU's core, and of an accelerator. The
second of each is odd: what is left over at the ends of tiles is computed by other code."""


def compute_workloads(dtype: torch.dtype, *, large: bool) -> Iterator[Workload]:
    """Yield what is computed in a dtype; ``large``: at an accelerator's sizes."""
    if dtype in FLOAT8:
        for shape in _ROWS[large]:
            yield _workload("cast", dtype, (shape,), partial(_there_and_back, dtype=dtype), of=torch.float32)
        return
    for m, k, n in _PRODUCTS[large]:
        yield _workload("matmul", dtype, ((m, k), (k, n)), torch.mm)
    for shape in _ROWS[large]:
        yield _workload("arithmetic", dtype, (shape, shape, shape), _arithmetic)
        yield _workload("sum", dtype, (shape,), _sums)
        if dtype.is_floating_point:
            for name, fn in _ROW_FUNCTIONS.items():
                yield _workload(name, dtype, (shape,), fn)
    if dtype.is_floating_point:
        for shape in _ATTENDED[large]:
            yield _workload("attention", dtype, (shape, shape, shape), F.scaled_dot_product_attention)


def _workload(
    name: str, dtype: torch.dtype, shapes: Shapes, fn: Callable[..., Any], of: torch.dtype | None = None
) -> Workload:
    grad = dtype in FLOATS
    call = partial(_call, fn=fn, shapes=shapes, dtype=of or dtype, grad=grad)
    return Workload(name, dtype_name(dtype), shape_text(*shapes), call, exact=not dtype.is_floating_point)


def _call(variant: int, _rank: int, *, fn: Callable[..., Any], shapes: Shapes, dtype: torch.dtype, grad: bool) -> Call:
    tensors = (drawn(shape, dtype, 100 * variant + place, grad=grad) for place, shape in enumerate(shapes))
    return Call(fn, tuple(tensors), gradients=grad, seed=variant)


def _arithmetic(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b + c


def _sums(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.sum(0, dtype=a.dtype), a.sum(-1, dtype=a.dtype)


def _normalized(a: Tensor) -> Tensor:
    return F.layer_norm(a, a.shape[-1:])


def _there_and_back(a: Tensor, dtype: torch.dtype) -> Tensor:
    return a.to(dtype).to(a.dtype)


_ROW_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softmax": partial(F.softmax, dim=-1),
    "layer_norm": _normalized,
    "exp": torch.exp,
    "gelu": F.gelu,
    "sin": torch.sin,
}
