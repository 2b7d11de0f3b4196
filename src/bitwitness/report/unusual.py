"""How unusual a number is for its row: what the heat map's ``z`` and the tree's colours are, where no rules watched the run.

A training's numbers move as it learns: the loss falls, moments fill, all gradients shrink together. None of that is unusual.
So what a step has in common for all rows of a kind is taken away, and each number is held against the steps just before it.
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_BLOCK = 16  # steps; a number is held against the two blocks before its own, those of the first one against themselves
_SPREAD = 0.05
"""Least spread (in ln) that is usual: weights hardly move, and a z-score of their rounding says nothing."""
_FEW = 4  # rows: of fewer none can be told to do what all do
_AT_ONCE = 4_000_000  # numbers: several copies are made of them


def unusual(logs: Floats) -> Floats:
    """Return how many usual deviations each number is from what its row was shortly before; rows by name, columns by step."""
    known = ~np.isnan(logs).all(axis=1)
    z = np.full_like(logs, np.nan)
    if not known.any():
        return z
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # blocks without a number have no median, and stay NaN
        rows = _own_movement(logs[known])
        size = max(1, _AT_ONCE // rows.shape[1])
        z[known] = np.concatenate([_of_rows(rows[first : first + size]) for first in range(0, len(rows), size)])
    return z


def _own_movement(rows: Floats) -> Floats:
    """Return what each row does beside what all do."""
    if len(rows) < _FEW:
        return rows
    together: Floats = np.nanmedian(rows - np.nanmedian(rows, axis=1, keepdims=True), axis=0, keepdims=True)
    return rows - np.nan_to_num(together)


def _of_rows(rows: Floats) -> Floats:
    count, steps = rows.shape
    blocks = -(-steps // _BLOCK)
    padded = np.full((count, blocks * _BLOCK), np.nan, dtype=np.float32)
    padded[:, :steps] = rows
    parts = padded.reshape(count, blocks, _BLOCK)
    before = np.maximum(np.arange(blocks) - 1, 0)
    history = np.concatenate([parts[:, np.maximum(before - 1, 0)], parts[:, before]], axis=2)
    usual = np.nanmedian(history, axis=2, keepdims=True)
    lately = 1.4826 * np.nanmedian(np.abs(history - usual), axis=2, keepdims=True)
    away = parts - usual
    ever = 1.4826 * np.nanmedian(np.abs(away).reshape(count, -1), axis=1)[:, None, None]
    spread = np.fmax(np.fmax(lately, ever), _SPREAD)
    found: Floats = (away / spread).reshape(count, -1)[:, :steps].astype(np.float32)
    return found
