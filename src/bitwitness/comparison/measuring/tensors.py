"""How far apart two kept tensors are, block by block: a block stays in the cache while it is read many times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.errors import UsageError
from bitwitness.numerics import ErrorMetrics, ulp_distance

_BLOCK = 1 << 16  # elements: half a MiB in float64, of which several copies stay in a core's cache
_TIGHT, _LOOSE = 1e-3, 5e-3  # relative errors that `ErrorMetrics` has shares for


@dataclass(slots=True)
class _Sums:
    """What adds up over blocks; the fields are those of `ErrorMetrics` before the last division."""

    count: int = 0
    finite: int = 0
    agreeing: int = 0
    product: float = 0.0
    squares_a: float = 0.0
    squares_b: float = 0.0
    squares_error: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    total_rel: float = 0.0
    counted_rel: int = 0
    ulp_max: int = 0
    tight: int = 0
    loose: int = 0
    nan_mismatch: int = 0
    inf_mismatch: int = 0


@torch.no_grad()
def tensor_metrics(actual: Tensor, golden: Tensor) -> ErrorMetrics:
    """Measure as `bitwitness.numerics.error_metrics` does, in float32 where that holds the values, and fast.

    Parameters
    ----------
    actual, golden
        CPU tensors of one shape; dtypes may differ.

    Raises
    ------
    UsageError
        If the shapes differ.

    """
    if actual.shape != golden.shape:
        raise UsageError(f"shapes differ: {list(actual.shape)} against {list(golden.shape)}; the two are not compared")
    actual, golden = _flat(actual), _flat(golden)
    sums = _Sums()
    for a, b in zip(actual.split(_BLOCK), golden.split(_BLOCK), strict=True):
        _add(sums, a, b)
    return _finished(sums)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bits in the same order."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integers[min(a.dtype.itemsize, 8)]  # complex128 is two of eight bytes
    return bool(torch.equal(*(tensor.contiguous().reshape(-1).view(kind) for tensor in (a, b))))


def _flat(x: Tensor) -> Tensor:
    x = x.detach()
    return torch.view_as_real(x.resolve_conj()).flatten() if x.is_complex() else x.flatten()


def _wide(x: Tensor, other: Tensor) -> torch.dtype:
    # Sums of at most a block's numbers lose little in float32, and are faster; their totals are Python's, in float64.
    narrow = all(t.dtype.is_floating_point and t.dtype.itemsize <= 4 for t in (x, other))
    return torch.float32 if narrow else torch.float64


def _add(sums: _Sums, raw_a: Tensor, raw_b: Tensor) -> None:
    sums.count += raw_a.numel()
    wide = _wide(raw_a, raw_b)
    a, b = raw_a.to(wide), raw_b.to(wide)
    error = a - b
    top = float(error.abs().max()) if len(error) else 0.0
    if not math.isfinite(top):  # else nothing is selected, which is slow
        raw_a, raw_b, a, b = _finite_only(sums, raw_a, raw_b, a, b)
        error = a - b
        top = float(error.abs().max()) if len(error) else 0.0
    sums.finite += len(a)
    if not len(a):
        return
    sums.max_abs = max(sums.max_abs, top)
    sums.product += float(torch.dot(a, b))
    sums.squares_a += float(torch.dot(a, a))
    sums.squares_b += float(torch.dot(b, b))
    sums.squares_error += float(torch.dot(error, error))
    if top == 0.0:  # nothing of this block differs, so that no division is needed
        sums.tight += len(a)
        sums.loose += len(a)
        sums.counted_rel += len(a)
        return
    _add_relative(sums, error.abs_(), b.abs())
    sums.ulp_max = max(sums.ulp_max, _ulp(raw_a, raw_b))


def _add_relative(sums: _Sums, error: Tensor, size: Tensor) -> None:
    relative = error / size
    relative.nan_to_num_(nan=0.0, posinf=math.inf)  # 0 of 0 is no error, and anything else of 0 an infinite one
    top = float(relative.max())
    sums.max_rel = max(sums.max_rel, top)
    sums.tight += int((relative <= _TIGHT).sum())
    sums.loose += int((relative <= _LOOSE).sum())
    if math.isinf(top):  # the mean leaves these out (`ErrorMetrics.mean_rel`)
        relative = relative[relative.isfinite()]
    sums.total_rel += float(relative.sum())
    sums.counted_rel += len(relative)


def _ulp(a: Tensor, b: Tensor) -> int:
    if not a.dtype.is_floating_point:
        return int((a.to(torch.float64) - b.to(torch.float64)).abs().max())
    b = b.to(a.dtype)
    if a.dtype != torch.float32:
        return int(ulp_distance(a, b).max())
    x, y = (t.view(torch.int32) for t in (a, b))
    # Monotone in the number: a negative one's other bits are turned around. In int64, where no difference overflows.
    x, y = (t.bitwise_xor((t >> 31).bitwise_and_(0x7FFFFFFF)).to(torch.int64) for t in (x, y))
    return int(x.sub_(y).abs_().max())


def _finite_only(
    sums: _Sums, raw_a: Tensor, raw_b: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count what is not finite on either side, and return the pairs that are on both."""
    finite = a.isfinite() & b.isfinite()
    nan_mismatch = a.isnan() != b.isnan()
    inf_mismatch = ~finite & ~a.isnan() & ~b.isnan() & (a != b)
    sums.nan_mismatch += int(nan_mismatch.sum())
    sums.inf_mismatch += int(inf_mismatch.sum())
    sums.agreeing += int((~finite).sum() - nan_mismatch.sum() - inf_mismatch.sum())
    return raw_a[finite], raw_b[finite], a[finite], b[finite]


def _finished(sums: _Sums) -> ErrorMetrics:
    norm_a, norm_b, norm_error = (math.sqrt(x) for x in (sums.squares_a, sums.squares_b, sums.squares_error))
    cosine = 1.0 if norm_a == norm_b else 0.0
    if norm_a and norm_b:
        cosine = min(1.0, max(-1.0, sums.product / (norm_a * norm_b)))
    mismatched = sums.nan_mismatch + sums.inf_mismatch
    return ErrorMetrics(
        cosine=cosine,
        max_abs=sums.max_abs,
        max_rel=sums.max_rel,
        mean_rel=sums.total_rel / sums.counted_rel if sums.counted_rel else 0.0,
        rmse=norm_error / math.sqrt(max(sums.finite, 1)),
        l2_relative=0.0 if norm_error == 0 else norm_error / norm_b if norm_b else math.inf,
        ulp_max=torch.iinfo(torch.int64).max if mismatched else sums.ulp_max,
        share_within_1e_3=(sums.tight + sums.agreeing) / sums.count if sums.count else 1.0,
        share_within_5e_3=(sums.loose + sums.agreeing) / sums.count if sums.count else 1.0,
        nan_mismatch=sums.nan_mismatch,
        inf_mismatch=sums.inf_mismatch,
    )
