"""The standards of msprobe, as mindstudio-probe 26.2.0 has them in ``pytorch/api_accuracy_checker``.

Their blind spots are kept, so that its results can be reproduced; where one is stricter here, its docstring says so.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from bitwitness.errors import UsageError
from bitwitness.numerics import ulp_distance
from bitwitness.trial.result import FAIL, PASS, WARN
from bitwitness.trial.standard import Given, Judged, by_allowance, standard

_ABSOLUTE = {  # rtol, up to which magnitude a value is small, and what it may be off then
    torch.float16: (2.0**-10, 2.0**-10, 2.0**-16),
    torch.bfloat16: (2.0**-8, 2.0**-10, 2.0**-16),
}
_ABSOLUTE_OTHER = (2.0**-20, 2.0**-20, 2.0**-30)


@standard("absolute")
def _absolute(given: Given) -> Judged:
    """Judge by msprobe's absolute thresholds: an error relative to the golden value or, of a small value, an absolute one.

    Source: precision_standard/standard_config.py. It allows small bfloat16 values an error of 1e-16, which correctly rounded
    ones do not keep; here they are allowed what float16 is.
    """
    rtol, small, atol = _ABSOLUTE.get(given.dtype, _ABSOLUTE_OTHER)
    golden = given.golden.abs()
    allowed = torch.where(golden <= small, atol, rtol * (golden + epsilon(given.dtype)))
    return by_allowance(given, (given.wide - given.golden).abs(), allowed, f"off by more than {rtol:.3g} of their size")


@standard("ulp")
def _ulp(given: Given) -> Judged:
    """Judge by units in the last place from the golden value rounded: more than 1 (up to 16 bits) or 32 (others) is bad.

    The limits are msprobe's (core/common/const.py), which lets 0.1 % of the elements (float32: 5 %, or any share with a mean
    below 64) be bad; here none may, and Inf against a number is bad however near it lies.
    """
    limit = 1 if given.dtype.itemsize <= 2 else 32
    distance = ulp_distance(given.actual, given.golden.to(given.dtype))
    bad = (distance > limit) | (given.wide.isinf() != given.rounded.isinf())
    count, total = int(bad.sum()), bad.numel()
    figures = {
        "ulp_max": float(distance.max()),
        "ulp_mean": float(distance.double().mean()),
        "bad_share": count / total,
    }
    if count:
        return Judged(FAIL, f"{count} of {total} elements are more than {limit} ULP off", figures)
    return Judged(PASS, "", figures)


@standard("thousandths")
def _thousandths(given: Given) -> Judged:
    """Judge as msprobe's pre-check does in its first step (compare/compare.py, ``_compare_float_tensor``).

    The reference is one precision up. In this order: a cosine of at most 0.99 fails; a largest absolute error below 1e-3
    passes, whatever the size of the values; of half types, 99 % of the elements must be within 1 % (else fail) and 99.9 %
    within 1e-3 (else warn); of others, 99.9 % within 1e-3 (else fail) and 99.99 % within 1e-4 (else warn). A lone Inf passes. A
    NaN against a number, which may pass there or be a warning, is a fail here.
    """
    half = given.dtype.itemsize <= 2
    golden = given.golden.to(torch.float32).to(torch.float64) if half else given.golden
    error = (given.wide - golden).abs()
    relative = error / (golden.abs() + epsilon(given.dtype))
    cosine = _cosine(given.wide, golden)
    figures = {"cosine": cosine, "max_abs": float(error.max())}
    figures |= {f"within_{limit:g}": float((relative < limit).double().mean()) for limit in (1e-2, 1e-3, 1e-4)}
    if cosine <= 0.99:
        return Judged(FAIL, f"the cosine is {cosine:.6g}, not above 0.99", figures)
    if figures["max_abs"] < 1e-3:
        return Judged(PASS, "", figures)
    for limit, verdict in ((1e-2, FAIL), (1e-3, WARN)) if half else ((1e-3, FAIL), (1e-4, WARN)):
        share = figures[f"within_{limit:g}"]
        if share <= 1 - limit:
            return Judged(
                verdict, f"{share:.4%} of the elements are within {limit:g}, not above {1 - limit:.2%}", figures
            )
    return Judged(PASS, "", figures)


def epsilon(dtype: torch.dtype) -> float:
    """Return what msprobe adds to a golden value before it divides by it."""
    if dtype is torch.bfloat16:
        return 2.0**-8
    return torch.finfo(torch.float32 if dtype.itemsize <= 2 else torch.float64).eps


def _cosine(actual: Tensor, golden: Tensor) -> float:
    """Return msprobe's cosine: 1 for one element and for two tensors of zeros, 0 where one is, NaN where any is not finite."""
    scales = [float(t.abs().max()) for t in (actual, golden)]
    none = [scale <= torch.finfo(torch.float64).eps for scale in scales]
    if len(actual) == 1 or all(none):
        return 1.0
    if any(none):
        return 0.0
    a, g = actual / scales[0], golden / scales[1]
    return float(torch.dot(a, g) / (torch.linalg.vector_norm(a) * torch.linalg.vector_norm(g)))


_LEVELS = {  # operators as msprobe names them (its npu_ ones by torch's names): limits of RMSE, mean and largest relative error
    "embedding scaled_dot_product_attention scatter scatter_add": (1.5, 1.5, 5.0),
    "addmm cross_entropy gelu layer_norm matmul mm index one_hot sum rms_norm nonzero": (1.2, 1.2, 2.0),
}
_LEVEL = (2.0, 2.0, 10.0)
_SMALL_VALUES = 2.0
_LEAST = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # what a benchmark's figure counts as where it is below
_LEAST_OTHER = 2.0**-14


@standard("benchmark")
def _benchmark(given: Given) -> Judged:
    """Judge as msprobe's second step does: the device's errors over those that a benchmark device makes of the same call.

    Four figures of each are divided: RMSE, mean and largest relative error of what is not small, and the share of the small
    values that are off by more than an absolute tolerance. Each ratio has a limit, by the operator's class. A figure of the
    benchmark below 2^-11 (float16), 2^-8 (bfloat16) or 2^-14 counts as that, so that small errors always pass. Sources:
    precision_standard/standard_config.py and benchmark_compare.py. There, what is not finite is left out; here, NaN or Inf
    against a number is a fail.
    """
    if given.benchmark is None:
        raise UsageError("the standard benchmark needs a benchmark's result; give one, or take another standard")
    strayed = int(((given.wide != given.rounded) & ~(given.wide.isfinite() & given.rounded.isfinite())).sum())
    strayed -= int((given.wide.isnan() & given.rounded.isnan()).sum())
    if strayed:
        return Judged(
            FAIL, f"{strayed} of {len(given.wide)} elements are Inf on one side only", {"inf_mismatch": float(strayed)}
        )
    rmse, mean, largest = limits_of(given.operator)
    limits = {"rmse": rmse, "mean_rel": mean, "max_rel": largest, "small_values": _SMALL_VALUES}
    device, benchmark = _errors(given.wide, given), _errors(given.benchmark.to(torch.float64), given)
    least = _LEAST.get(given.dtype, _LEAST_OTHER)
    ratios = {name: device[name] / max(benchmark[name], least) for name in limits}
    figures = {f"{name}_ratio": ratio for name, ratio in ratios.items()} | device
    over = [
        f"{name} is {ratios[name]:.4g} times the benchmark's, limit {limits[name]:g}"
        for name in limits
        if ratios[name] > limits[name]
    ]
    return Judged(FAIL, "; ".join(over), figures) if over else Judged(PASS, "", figures)


def limits_of(operator: str) -> tuple[float, float, float]:
    """Return the limits of the ratios of RMSE, mean and largest relative error for an operator such as ``aten::sum.dim``."""
    parts = {part.strip("_").lower() for part in re.split(r"[.:/\[]+", operator)}
    return next((limits for names, limits in _LEVELS.items() if parts & set(names.split())), _LEVEL)


def _errors(result: Tensor, given: Given) -> dict[str, float]:
    """Return a result's four figures against the golden one, over what is finite on both sides."""
    _, small, _ = _ABSOLUTE.get(given.dtype, _ABSOLUTE_OTHER)
    atol = 1e-16 if given.dtype.itemsize <= 2 else 2.0**-30
    finite = result.isfinite() & given.rounded.isfinite()
    result, golden = result[finite], given.golden[finite]
    error, is_small = (result - golden).abs(), golden.abs() <= small
    relative = (error / (golden.abs() + epsilon(given.dtype)))[~is_small]
    return {
        "rmse": float(error.square().mean().sqrt()) if len(error) else 0.0,
        "mean_rel": float(relative.mean()) if len(relative) else 0.0,
        "max_rel": float(relative.max()) if len(relative) else 0.0,
        "small_values": float((error[is_small] > atol).double().mean()) if bool(is_small.any()) else 0.0,
    }
