"""Rows of matrices on a CPU, read in passing: one call of the compiled reader, and no operator of torch.

In a training step whose caches are full of other things each operator takes some 30 us, however little it reads. So a reading
leaves its rows' figures where the compiled reader puts them, and all of a step's readings are brought together at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bitwitness.stats.reader import KINDS, Figures, Reader

_ROWS = 1 << 14
"""Rows whose figures wait, 0.9 MB; a step reads some hundreds. What comes before is brought together when it is full."""
_PLANS = 256
"""Shapes whose rows' places are kept."""
_LOW, _HIGH, _SQUARES, _THERE = (Figures._fields.index(name) for name in ("low", "high", "squares", "there"))
_ROW_BYTES = 8 * len(Figures._fields)


class Plan(NamedTuple):
    """How every k-th row of one shape is read: of at most ``count`` rows the places from the first on, in bytes."""

    every: int
    rows: int
    width: int
    step: int
    offsets: NDArray[np.uintp]
    places: NDArray[np.uintp]
    kinds: NDArray[np.int32]
    counts: NDArray[np.int64]
    at: tuple[int, int, int]


class RowReader:
    """Reads rows, and keeps their figures until `take`.

    Parameters
    ----------
    compiled
        What reads.

    """

    def __init__(self, compiled: Reader) -> None:
        self._compiled = compiled
        self._plans: dict[object, Plan] = {}
        self._found = np.empty((_ROWS, len(Figures._fields)))
        self._begin = self._found.ctypes.data
        self._used = 0
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._done: list[NDArray[np.float64]] = []

    def read(self, value: Tensor, most: int, turn: int) -> int:
        """Read every k-th row of a tensor, about ``most`` elements; return how many. 0: the reader does not take it."""
        if type(value) is not Tensor or not self._compiled.takes(value):
            return 0
        key = (value.shape, value.dtype, most)
        plan = self._plans.get(key) or self._planned(key, value, most)
        first = turn % plan.every
        count = (plan.rows - first - 1) // plan.every + 1
        if count > _ROWS - self._used:
            self._fold()
            if count > _ROWS:
                return 0
        np.add(plan.offsets, value.data_ptr() + first * plan.step, out=plan.places)
        self._compiled.read_at(count, *plan.at, self._begin + self._used * _ROW_BYTES)
        self._starts.append(self._used)
        self._sizes.append(count * plan.width)
        self._used += count
        return self._sizes[-1]

    def take(self) -> NDArray[np.float64]:
        """Return largest magnitude, L2, largest norm of a row and count of zeros of each reading, [K, 4], and forget them."""
        self._fold()
        done, self._done = self._done, []
        return np.concatenate(done) if done else np.zeros((0, 4))

    def forget(self) -> None:
        """Forget the readings."""
        self._used, self._starts, self._sizes, self._done = 0, [], [], []

    def _planned(self, key: object, value: Tensor, most: int) -> Plan:
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        width = value.shape[-1] if value.dim() else 1
        rows = value.numel() // width
        every = min(-(-value.numel() // max(most, 1)), rows)
        count, step = (rows - 1) // every + 1, width * value.element_size()
        offsets = np.arange(count, dtype=np.uintp) * np.uintp(every * step)
        places, kinds = np.empty_like(offsets), np.full(count, KINDS[value.dtype], dtype=np.int32)
        counts = np.full(count, width, dtype=np.int64)
        at = kinds.ctypes.data, places.ctypes.data, counts.ctypes.data
        self._plans[key] = plan = Plan(every, rows, width, step, offsets, places, kinds, counts, at)
        return plan

    def _fold(self) -> None:
        if not self._starts:
            return
        found, starts = self._found[: self._used], np.array(self._starts)
        squares = np.add.reduceat(found[:, _SQUARES], starts)
        largest = np.maximum(np.maximum.reduceat(found[:, _HIGH], starts), -np.minimum.reduceat(found[:, _LOW], starts))
        with np.errstate(invalid="ignore"):
            norms = np.sqrt([squares, np.maximum.reduceat(found[:, _SQUARES], starts)])
        zeros = np.array(self._sizes) - np.add.reduceat(found[:, _THERE], starts)
        # beside NaN the extremes mean nothing
        self._done.append(np.stack([np.where(np.isnan(squares), np.nan, largest), norms[0], norms[1], zeros], 1))
        self._used, self._starts, self._sizes = 0, [], []
