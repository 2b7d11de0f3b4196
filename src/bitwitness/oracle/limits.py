"""What rounding may do to an operator's result, by dtype: the bounds that a distance from float64 is held against.

Two kinds. A *bound* is reasoned element by element, from the operator's formula: ``|value - expected| <= r u |expected| + s
u_sum sqrt(n) sum |terms|``. The first part is the result's own rounding. The second is that of its sum of n terms, whose errors
count relative to the terms and not to a sum that cancels (Higham, "Accuracy and Stability of Numerical Algorithms", 3.5), and
grow like the square root of their number (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019).
A *limit* is one number for a whole result, for operators of which no formula is known here.

A bound or limit that is too narrow convicts a healthy device, one that is too wide lets a small error pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import unit_roundoff
from bitwitness.oracle.names import canonical
from bitwitness.stats.local import local_values

ROUNDING = 3.0
"""Rounding of a product's result, in units of its u: independent roundings give sigma = 0.41, so 7 sigma.

`bench/checksum_cost.py clean` prints how near to it and to `ACCUMULATION` healthy products come: in float32 to 0.26 of
the checksum's threshold at most, with constant factors (torch 2.13 on a CPU).
"""
ACCUMULATION = 4.0
"""What the order of summation leaves in a product, in units of u_sum sqrt(n) times the size of its terms."""
PARTS = 3.0
"""What adding up a sum's parts leaves, in units of `parts_roundoff` times the sum's size: seven standard deviations of it,
and of a check that is computed in the same way."""
LIMIT = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 2e-3, torch.float64: 2e-3}
"""Errors of a whole result, by L2, that no healthy operator shows: some ten times what rounding one result leaves,
sums included.

For float32 that is four times what TF32 leaves (2^-11), which a healthy device may be set to. For float64 it is the same, since
accelerators without float64 may compute in float32: what is wrong by more is wrong in any case.
"""
SINGLE = 8
"""Times the limit that one element may be off, beside its own size and the result's usual one: the largest of a
million roundings."""
_REDUCED_FACTORS = {"tf32": 2.0**-11, "bf16": unit_roundoff(torch.bfloat16)}
"""Unit roundoffs of torch's float32 precisions that round a product's factors; TF32 keeps 11 significant bits."""
_TENSOR_FLOAT_32 = (8, 0)
"""The compute capability of the first CUDA devices that have TF32."""
_OVERFLOW_MARGIN = 1e-3
"""Share of the square root of a dtype's largest number from which inputs may overflow: room for a sum of a million squares."""
_UNDERFLOW_MARGIN = 1e3
"""The same for the smallest normal number, by whose square, rounded to zero, something may be divided."""


_CANCELLED = 0.01
_CANCELLED_ROUNDINGS = 8.0


def cancelled(tensors: Iterable[Tensor]) -> float:
    """Return the share of its terms' size below which a result is one that cancelled: its error is relative to that share.

    A sum that comes to nothing has no relative accuracy: what rounding leaves in it is relative to what was added up. The share
    is 1 %, which in float32 allows some 300 roundings of every term; or what allows eight roundings of every term in the
    coarsest dtype, for a kernel may hold its terms in that (the probabilities of attention, say), or in the precision to which
    torch may round a product's factors.
    """
    given = list(tensors)
    u = max((max(unit_roundoff(t.dtype), factor_roundoff(t)) for t in given if t.dtype in LIMIT), default=0.0)
    return max(_CANCELLED, _CANCELLED_ROUNDINGS * u / (limit_of(given) or 1.0))


_IN_PLACE = ("backward", "embedding", "index_", "scatter")
_ADDED_WIDE = ("conv", "attention", "mkldnn", "cudnn_conv")
_REDUCES = 1.5
"""Elements of an input for each of the result, from which a backward is taken to sum them."""


def summed_in_place(op: str, inputs: Sequence[Tensor], output: Tensor) -> float:
    """Return the relative error of a result that a kernel may add up one by one, in its coarsest dtype; 0 for no such.

    So some backwards do, of normalisations on a CPU and of what gathers rows (torch 2.13): a sum of n equal terms loses up to
    half of n roundings, which in bfloat16 may be all of it. Products, convolutions and attention add up in float32.
    """
    name = canonical(op)
    wide = name.startswith(_ADDED_WIDE) or not any(part in name for part in _IN_PLACE)
    if wide or output.dtype not in LIMIT:
        return 0.0
    largest = max((tensor.numel() for tensor in inputs), default=0)
    gathers = "backward" not in name or name.startswith("embedding")
    terms = largest / max(output.shape[-1] if gathers and output.dim() else output.numel(), 1)
    coarsest = max(unit_roundoff(tensor.dtype) for tensor in (*inputs, output) if tensor.dtype in LIMIT)
    return 0.5 * coarsest * terms if terms > _REDUCES else 0.0


def accumulation_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff in which a result of this floating dtype is summed: float32's, or its own where that is finer.

    Kernels for half types accumulate in float32.
    """
    return min(unit_roundoff(dtype), unit_roundoff(torch.float32))


def factor_precision(out: Tensor, *, convolution: bool = False) -> str:
    """Return to what torch may round a float32 product's factors on ``out``'s device: ``tf32``, ``bf16``; empty for nothing.

    On CUDA it may by default for convolutions alone, on a device that has TF32.
    """
    if out.dtype is not torch.float32:
        return ""
    backend: Any = torch.backends.mkldnn
    if out.device.type == "cuda":
        if torch.cuda.get_device_capability(out.device) < _TENSOR_FLOAT_32:
            return ""
        backend = torch.backends.cudnn if convolution else torch.backends.cuda
    setting = str(getattr(backend.conv if convolution else backend.matmul, "fp32_precision", ""))
    return setting if setting in _REDUCED_FACTORS else ""


def factor_roundoff(out: Tensor) -> float:
    """Return the unit roundoff to which torch may round the factors of a float32 matrix product on ``out``'s device."""
    return _REDUCED_FACTORS.get(factor_precision(out), 0.0)


def factor_convolution(out: Tensor) -> float:
    """Return the same of a float32 convolution."""
    return _REDUCED_FACTORS.get(factor_precision(out, convolution=True), 0.0)


_TILE = 128
"""Rows and columns of a result that one block of threads computes, as cuBLAS's kernels have it."""
_SHORTEST_PART = 64
"""Terms in a part of a sum, at the least."""
_REDUCED = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}


def parts_roundoff(out: Tensor, inner: int) -> float:
    """Return what a product's sum, added up in parts, may lose relative to its size at any time; 0 where parts are summed wide.

    Where a result has fewer tiles than the device has processors, cuBLAS splits the sum, and torch lets it add the parts in a
    half type (``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``, on by default): s roundings of what has
    been added up so far, which leave sqrt(s) u. ``out``: ``[*batch, M, N]``; ``inner``: the length of the sum.
    """
    switch = _REDUCED.get(out.dtype)
    if out.device.type != "cuda" or switch is None or not getattr(torch.backends.cuda.matmul, switch, True):
        return 0.0
    tiles = math.prod(out.shape[:-2]) * math.ceil(out.shape[-2] / _TILE) * math.ceil(out.shape[-1] / _TILE)
    processors = torch.cuda.get_device_properties(out.device).multi_processor_count
    parts = min(math.ceil(2 * processors / max(tiles, 1)), inner // _SHORTEST_PART)
    return math.sqrt(parts) * unit_roundoff(out.dtype) if parts > 1 else 0.0


def underflow(dtype: torch.dtype) -> float:
    """Return how far a result near zero may be off, however small it is: it is flushed to zero, or is one of few subnormals.

    Float16's are told apart everywhere, as gradients need them: 2**-24 lies between two.
    """
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0)


def sum_bound(
    expected: Tensor,
    magnitudes: Tensor,
    dtype: torch.dtype,
    terms: float,
    *,
    rounding: float,
    accumulation: float,
    factors: float = 0.0,
    parts: float = 0.0,
) -> Tensor:
    """Return what rounding allows for each element of a sum of ``terms`` products.

    Parameters
    ----------
    expected
        The result in float64.
    magnitudes
        The same sum over the terms' magnitudes; float64, of expected's shape.
    dtype
        The dtype in which the operator returned the result.
    terms
        How many terms each element has.
    rounding, accumulation
        Units allowed for the result's own rounding and for its sum's.
    factors
        Relative error of the factors themselves (`factor_roundoff`).
    parts
        What adding up parts of the sum leaves (`parts_roundoff`), of the sum's size as its terms come in random order.

    """
    summed = accumulation * (accumulation_roundoff(dtype) * math.sqrt(terms) + factors + parts / math.sqrt(terms))
    return (rounding * unit_roundoff(dtype) + PARTS * parts) * expected.abs() + summed * magnitudes


def limit_of(tensors: Iterable[Tensor]) -> float:
    """Return the error, by L2, that the coarsest of the tensors' dtypes allows (a kernel may compute in it); 0 for none."""
    return max((LIMIT[t.dtype] for t in tensors if t.dtype in LIMIT), default=0.0)


def may_overflow(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether a result that is not finite may be right: squares of such inputs leave the result's range.

    Upwards they become infinite, downwards zero, by which something may be divided.
    """
    for output in outputs:
        if output.is_floating_point() and output.numel() and not bool(torch.isfinite(local_values(output)).all()):
            sizes = torch.cat(
                [t.detach().cpu().double().abs().reshape(-1) for t in inputs] or [torch.zeros(1).double()]
            )
            range_ = torch.finfo(output.dtype)
            smallest = sizes[sizes > 0].amin() if bool((sizes > 0).any()) else torch.ones(())
            high = not float(sizes.amax()) < _OVERFLOW_MARGIN * range_.max**0.5
            return high or float(smallest) < _UNDERFLOW_MARGIN * range_.tiny**0.5
    return False
