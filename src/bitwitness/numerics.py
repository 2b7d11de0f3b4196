"""How far two tensors are apart: unit roundoff, ULP distance, error metrics.

Everything here is a pure function of its arguments. Floating-point formats are described by the bits of their
significand (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 2.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.errors import UsageError

_SIGNIFICAND_BITS = {  # the hidden bit included
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.float8_e4m3fn: 4,
    torch.float8_e4m3fnuz: 4,
    torch.float8_e5m2: 3,
    torch.float8_e5m2fnuz: 3,
    torch.float8_e8m0fnu: 1,
    torch.float4_e2m1fn_x2: 2,
}
PACKED = (torch.float4_e2m1fn_x2,)
"""Types with two numbers in one element: torch has no arithmetic and no cast for them."""
_UNSIGNED = (torch.float8_e8m0fnu,)  # a bare exponent, without a sign bit
FLOAT8 = tuple(dtype for dtype in _SIGNIFICAND_BITS if dtype.itemsize == 1 and dtype not in PACKED)
"""Types that only store: whatever computes with them casts first."""
INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that hold the bits of an element of so many bytes."""
HALF = (torch.float16, torch.bfloat16)
"""The half types that have arithmetic of their own: kernels compute in float32 for them."""
_FARTHEST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class ErrorMetrics:
    """How far an actual tensor is from a golden one; every figure is computed in float64.

    The magnitudes are over the pairs that are finite on both sides. A pair of NaNs, or of equal infinities,
    is no error; any other pair with a NaN or an Inf is counted as a mismatch, and is outside both shares.

    Attributes
    ----------
    cosine
        Cosine of the angle between the two; 1 if both are zero, 0 if only one is.
    max_abs, rmse
        Largest and root-mean-square absolute error.
    max_rel, mean_rel
        Largest and mean error relative to the golden value. Where that is 0 and the actual value is not, the
        error is infinite: it makes ``max_rel`` infinite and is left out of ``mean_rel``.
    l2_relative
        Norm of the error over the norm of the golden tensor (0/0 is 0).
    ulp_max
        Largest `ulp_distance` in the actual tensor's dtype, to which the golden one is rounded first
        (mismatches count: a NaN on one side only gives the largest int64); for integers and bool the largest
        absolute error.
    share_within_1e_3, share_within_5e_3
        Share of the elements with ``|actual - golden| <= 1e-3 |golden|`` (or 5e-3), from 0 to 1; 1 if there
        are none.
    nan_mismatch, inf_mismatch
        Elements that are NaN on one side only; and, of the others, those that are Inf on one side only or
        differ in sign.

    """

    cosine: float
    max_abs: float
    max_rel: float
    mean_rel: float
    rmse: float
    l2_relative: float
    ulp_max: int
    share_within_1e_3: float
    share_within_5e_3: float
    nan_mismatch: int
    inf_mismatch: int


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor holds floating or complex numbers, one in each element."""
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype not in PACKED)


def smallest_number(dtype: torch.dtype) -> float:
    """Return the smallest subnormal number of a floating dtype."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal * info.eps)


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a floating one are summed here: float32, float64 for a float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return u = 2^-p, the largest relative error of rounding to nearest.

    p counts the bits of the significand, the hidden one included. A complex dtype has the unit roundoff of
    its parts. Raises `UsageError` for a dtype that is not floating.
    """
    real = dtype.to_real() if dtype.is_complex else dtype
    if real not in _SIGNIFICAND_BITS:
        raise UsageError(f"{dtype} has no unit roundoff; expected a floating-point or complex dtype")
    return 2.0 ** -_SIGNIFICAND_BITS[real]


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Count the representable numbers between two tensors, element by element.

    Bit patterns are mapped to integers in the order of the numbers they stand for (Dawson, "Comparing
    floating point numbers", 2012), so the largest finite number is one away from Inf, and +0 and -0 are the
    same.

    Parameters
    ----------
    a, b
        Tensors of one floating dtype and one shape.

    Returns
    -------
    Tensor
        int64, of that shape. NaN to NaN is 0, NaN to a number the largest int64; so is a float64 distance
        beyond it.

    Raises
    ------
    UsageError
        If dtypes or shapes differ, or the dtype is not a floating one with a number in each element.

    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise UsageError(
            f"an ULP distance needs two tensors of one dtype and shape, not {a.dtype} {list(a.shape)} and "
            f"{b.dtype} {list(b.shape)}; cast or broadcast one of them first"
        )
    if a.dtype not in _SIGNIFICAND_BITS or a.dtype in PACKED:
        raise UsageError(f"{a.dtype} has no ULP; expected a floating dtype that holds one number in each element")
    left, right = _ordered(a), _ordered(b)
    across = left.abs() + right.abs()  # over zero; float64 may pass 2^63 and wrap, which shows as a negative sum
    across.masked_fill_(across < 0, _FARTHEST)
    distance = torch.where((left < 0) == (right < 0), (left - right).abs(), across)
    a_nan, b_nan = _isnan(a), _isnan(b)
    return distance.masked_fill_(a_nan != b_nan, _FARTHEST).masked_fill_(a_nan & b_nan, 0)


def _ordered(x: Tensor) -> Tensor:
    """Map each number to an int64 such that order is kept and neighbours differ by one."""
    bits = x.detach().contiguous().view(INTEGER_OF_SIZE[x.dtype.itemsize]).to(torch.int64)
    if x.dtype in _UNSIGNED:
        return bits & 0xFF
    magnitude = bits & torch.iinfo(INTEGER_OF_SIZE[x.dtype.itemsize]).max
    return torch.where(bits < 0, -magnitude, magnitude)


def _isnan(x: Tensor) -> Tensor:
    return torch.isnan(x.detach().to(torch.float32) if x.dtype.itemsize == 1 else x.detach())


@torch.no_grad()
def error_metrics(actual: Tensor, golden: Tensor) -> ErrorMetrics:
    """Measure how far ``actual`` is from ``golden``, on the CPU in float64.

    Parameters
    ----------
    actual, golden
        Tensors of one shape; dtypes and devices may differ. Complex tensors are read as their real and
        imaginary parts.

    Raises
    ------
    UsageError
        If the shapes differ, or only one of the tensors is complex.

    """
    if actual.shape != golden.shape or actual.is_complex() != golden.is_complex():
        raise UsageError(
            f"error metrics need two tensors of one shape, both real or both complex, not {actual.dtype} "
            f"{list(actual.shape)} and {golden.dtype} {list(golden.shape)}"
        )
    actual, golden = _real_on_cpu(actual), _real_on_cpu(golden)
    a, g = actual.to(torch.float64), golden.to(torch.float64)
    finite = a.isfinite() & g.isfinite()
    nan_mismatch = a.isnan() != g.isnan()
    inf_mismatch = ~finite & ~a.isnan() & ~g.isnan() & (a != g)
    count = a.numel()
    a, g = a[finite], g[finite]
    error = (a - g).abs_()
    size = g.abs()
    relative = torch.where(error == 0, error, error / size)
    agreeing = count - len(error) - int(nan_mismatch.sum()) - int(inf_mismatch.sum())
    return ErrorMetrics(
        cosine=_cosine(a, g),
        max_abs=_largest(error),
        max_rel=_largest(relative),
        mean_rel=_mean(relative[relative.isfinite()]),
        rmse=_norm(error) / max(len(error), 1) ** 0.5,
        l2_relative=_ratio(_norm(error), _norm(g)),
        ulp_max=_ulp_max(actual, golden),
        share_within_1e_3=_share(error <= 1e-3 * size, agreeing, count),
        share_within_5e_3=_share(error <= 5e-3 * size, agreeing, count),
        nan_mismatch=int(nan_mismatch.sum()),
        inf_mismatch=int(inf_mismatch.sum()),
    )


def _real_on_cpu(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    return torch.view_as_real(x.resolve_conj()).flatten() if x.is_complex() else x.flatten()


def _ulp_max(actual: Tensor, golden: Tensor) -> int:
    if actual.numel() == 0:
        return 0
    if actual.dtype.is_floating_point:
        return int(ulp_distance(actual, golden.to(actual.dtype)).max())
    return int((actual.to(torch.float64) - golden.to(torch.float64)).abs().max())


def _largest(x: Tensor) -> float:
    return float(x.max()) if len(x) else 0.0


def _mean(x: Tensor) -> float:
    return float(x.mean()) if len(x) else 0.0


def _scaled(x: Tensor) -> tuple[Tensor, float]:
    """Divide by the largest magnitude, so that squares neither overflow nor vanish."""
    scale = _largest(x.abs())
    return (x / scale if scale else x), scale


def _norm(x: Tensor) -> float:
    scaled, scale = _scaled(x)
    if math.isinf(scale):
        return scale
    return scale * float(torch.linalg.vector_norm(scaled))


def _cosine(a: Tensor, g: Tensor) -> float:
    (a, a_scale), (g, g_scale) = _scaled(a), _scaled(g)
    if not a_scale or not g_scale:
        return 1.0 if a_scale == g_scale else 0.0
    cosine = float(torch.dot(a, g) / (torch.linalg.vector_norm(a) * torch.linalg.vector_norm(g)))
    return min(1.0, max(-1.0, cosine))


def _ratio(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole else float("inf")


def _share(within: Tensor, agreeing: int, count: int) -> float:
    """Share of all elements within a bound, of which ``within`` tells for the finite pairs."""
    return (int(within.sum()) + agreeing) / count if count else 1.0
