"""Which dtypes hold what: whether a wider one would help, and which."""

from __future__ import annotations

import torch

from bitwitness.numerics import smallest_number

_CANDIDATES = (torch.float16, torch.bfloat16, torch.float32)
_COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
_WIDER = 2.0  # times the largest number, at least: bfloat16's range is float32's


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def largest(dtype: torch.dtype) -> float:
    """Return the largest number that a dtype holds."""
    return float(torch.finfo(dtype).max)


def shows_no_infinity(dtype: torch.dtype) -> bool:
    """Tell whether a dtype has NaN only, so that an overflow shows as that."""
    return dtype.itemsize == 1 and dtype is not torch.float8_e5m2


def wider(dtype: torch.dtype, size: float = 0.0) -> list[str]:
    """Return the names of the dtypes with a wider range than ``dtype`` that hold a magnitude of ``size``, narrow ones first.

    float64 is among them only where nothing else helps; empty where nothing does.
    """
    own = largest(dtype)
    names = {other: other for other in (*_CANDIDATES, torch.float64)}
    if dtype.is_complex:
        names = {real: pair for real, pair in _COMPLEX.items() if pair is not torch.complex32}
    holding = [real for real in names if largest(real) >= max(size, _WIDER * own)]
    plain = [real for real in holding if real is not torch.float64]
    return [dtype_name(names[real]) for real in plain or holding]


def smallest(dtype: torch.dtype) -> float | None:
    """Return the smallest number above zero, where ordinary numbers fall below it; None for the wide dtypes."""
    if dtype in (torch.float32, torch.bfloat16, torch.float64) or dtype.is_complex:
        return None
    return smallest_number(dtype)
