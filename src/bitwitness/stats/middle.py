"""The median of few numbers, without what makes numpy's slow for them: it is asked for a dozen times at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def median(values: NDArray[np.float64] | Sequence[float]) -> float:
    """Return the median as `numpy.median` does, NaN where there is one among the numbers; NaN of none."""
    flat = np.array(values, dtype=np.float64).ravel()
    size = flat.size
    if not size:
        return float("nan")
    flat.partition((size - 1) // 2 if size % 2 else [size // 2 - 1, size // 2])
    if np.isnan(flat).any():
        return float("nan")
    low, high = flat[(size - 1) // 2], flat[size // 2]
    return float((low + high) / 2)


def grown(values: NDArray[Any], size: int, fill: float = 0.0) -> NDArray[Any]:
    """Return numbers [..., n] with as many more behind them that there are ``size``; as they are where there are."""
    missing = size - values.shape[-1]
    if missing <= 0:
        return values
    return np.concatenate([values, np.full((*values.shape[:-1], missing), fill, dtype=values.dtype)], axis=-1)
