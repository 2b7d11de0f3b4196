"""A cumulative sum that sees what moves more slowly than a history learns: its reference hardly moves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bitwitness.monitor.sheet import Numbers

_FIRST = 16  # values whose median is the first reference
_MEMORY = 0.005  # of the reference: some 200 steps
_STEP_MEMORY = 0.05  # of the deviation
_SLACK, _LIMIT, _CLIP = 1.0, 14.0, 6.0
"""With independent normal values the sum passes its limit once in e^28 steps (Siegmund, 1985); what wanders by itself, and the
spread that was learned from few values, bring it there sooner."""
_TO_SIGMA = 0.886  # of a mean absolute difference of two normal values: sqrt(pi) / 2


class SlowSum:
    """Follows F numbers that should stay where they are.

    The deviation is that of one step from the last, in which a drift hardly shows, and not below ``floor``.
    What is nearer than ``least`` to its place has not drifted.
    """

    def __init__(self, size: int, floor: float, least: float = 0.0) -> None:
        self._floor = floor
        self._least = least
        self._first: list[Numbers] = []
        self._mean = np.full(size, np.nan)
        self._last = np.full(size, np.nan)
        self._difference = np.zeros(size)
        self._seen = np.zeros(size)
        self._up, self._down = np.zeros(size), np.zeros(size)
        self.gap = np.zeros(size)
        """How far the last values were from their places."""

    def step(self, values: Numbers) -> Numbers:
        """Take a step in (NaN where there is none); return how near each is to its limit, signed: beyond 1 it drifted."""
        change = np.abs(values - self._last)
        known = np.isfinite(change)
        self._seen += known
        weight = np.maximum(_STEP_MEMORY, 1.0 / np.maximum(self._seen, 1.0))
        usual = np.where(self._seen > _FIRST, 4.0 * np.maximum(self._difference, self._floor), np.inf)
        self._difference += np.where(known, weight * (np.minimum(np.nan_to_num(change), usual) - self._difference), 0.0)
        self._last = np.where(np.isfinite(values), values, self._last)
        if len(self._first) < _FIRST:
            self._first.append(values)
            if len(self._first) == _FIRST:
                self._mean = _median(np.stack(self._first))
            return np.zeros_like(self._mean)
        gap = self.gap = values - self._mean
        z = np.nan_to_num(gap / np.maximum(_TO_SIGMA * self._difference, self._floor)).clip(-_CLIP, _CLIP)
        self._up = np.maximum(self._up + z - _SLACK, 0.0)
        self._down = np.maximum(self._down - z - _SLACK, 0.0)
        self._mean = np.where(np.isfinite(self._mean), self._mean + _MEMORY * np.nan_to_num(gap), values)
        share = np.where(self._up >= self._down, self._up, -self._down) / _LIMIT
        share = np.where(np.abs(np.nan_to_num(gap)) >= self._least, share, 0.0)
        self._begin_anew(np.abs(share) > 1, values)
        return share

    def _begin_anew(self, beyond: NDArray[np.bool_], values: Numbers) -> None:
        """Take the new place for the usual one, once it was told of."""
        self._mean = np.where(beyond & np.isfinite(values), values, self._mean)
        self._up[beyond] = self._down[beyond] = 0.0


def _median(rows: Numbers) -> Numbers:
    """Return medians of columns, without a warning where all is NaN."""
    result = np.full(rows.shape[1], np.nan)
    some = np.isfinite(rows).any(axis=0)
    result[some] = np.nanmedian(rows[:, some], axis=0)
    return result
