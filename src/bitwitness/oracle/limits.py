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

import torch
from torch import Tensor

from bitwitness.numerics import unit_roundoff
from bitwitness.stats.local import local_values

ROUNDING = 3.0
"""Rounding of a product's result, in units of its u: independent roundings give sigma = 0.41, so 7 sigma.

`bench/checksum_cost.py clean` prints how near to it and to `ACCUMULATION` healthy products come: in float32 to 0.26 of
the checksum's threshold at most, with constant factors (torch 2.13 on a CPU).
"""
ACCUMULATION = 4.0
"""What the order of summation leaves in a product, in units of u_sum sqrt(n) times the size of its terms."""
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
_OVERFLOW_MARGIN = 1e-3
"""Share of the square root of a dtype's largest number from which inputs may overflow: room for a sum of a million squares."""
_UNDERFLOW_MARGIN = 1e3
"""The same for the smallest normal number, by whose square, rounded to zero, something may be divided."""


def accumulation_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff in which a result of this floating dtype is summed: float32's, or its own where that is finer.

    Kernels for half types accumulate in float32.
    """
    return min(unit_roundoff(dtype), unit_roundoff(torch.float32))


def factor_roundoff(out: Tensor) -> float:
    """Return the unit roundoff to which torch may round a float32 product's factors on ``out``'s device (TF32, bfloat16)."""
    if out.dtype is not torch.float32:
        return 0.0
    backend = torch.backends.cuda if out.device.type == "cuda" else torch.backends.mkldnn
    return _REDUCED_FACTORS.get(str(getattr(backend.matmul, "fp32_precision", "ieee")), 0.0)


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

    """
    summed = accumulation * (accumulation_roundoff(dtype) * math.sqrt(terms) + factors)
    return rounding * unit_roundoff(dtype) * expected.abs() + summed * magnitudes


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
