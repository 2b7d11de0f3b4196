"""How far two recorded values are apart, judged by their statistics and hashes: many pairs at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bitwitness.comparison.matching.frame import UNKNOWN, Floats, Ints, StepFrame
from bitwitness.store.rows import AT_LEAST_ONE

ORDER_DIFFERS = 1.0
"""The change where the same bits lie in another order."""
_TINY = 2.0**-126
"""The smallest normal number of float32 and bfloat16: what differs by less is zero on devices that flush, or rounding of it."""
BITS_DIFFER = 1e-30
"""The change where hashes differ and statistics do not."""
_MOVED = 1e-6
"""Relative change of a weight's norm from which it has moved: a transposed view adds it up in another order."""


def moved(frame: StepFrame, before: int, after: int) -> bool:
    """Return whether two rows of one run's weight, or of views of it, show two of its values."""
    sizes = float(frame.numbers["l2"][before]), float(frame.numbers["l2"][after])
    return abs(sizes[0] - sizes[1]) > _MOVED * max(sizes)


def changes(a: StepFrame, b: StepFrame, rows_a: Ints, rows_b: Ints) -> Floats:
    """Return the relative change of each pair of rows.

    The largest of: difference of the means and of the L2 norms (of each element's share of it), against the root mean
    square; difference of the sketches against the L2 norm, where values lie in the same order; difference of minima and of
    maxima against the largest magnitude. 0 where nothing is known to differ, infinity where sizes or numbers of NaN and Inf do.
    """
    if not len(rows_a):
        return np.zeros(0)
    count = np.maximum(np.maximum(a.count[rows_a], b.count[rows_b]), 1).astype(np.float64)
    rms = np.fmax(a.numbers["l2"][rows_a], b.numbers["l2"][rows_b]) / np.sqrt(count)
    top = np.fmax(_largest(a, rows_a), _largest(b, rows_b))
    parts = [
        _relative(_gap(a, b, rows_a, rows_b, "l2") / np.sqrt(count), rms),
        _relative(_gap(a, b, rows_a, rows_b, "mean"), rms),
        _relative(_sketch_gap(a, b, rows_a, rows_b) / np.sqrt(count), rms),
        _relative(_gap(a, b, rows_a, rows_b, "min"), top),
        _relative(_gap(a, b, rows_a, rows_b, "max"), top),
    ]
    found: Floats = np.maximum.reduce(parts)
    found = _with_hashes(a, b, rows_a, rows_b, found)
    for pair in np.flatnonzero((found == 0) & ~same_order(a, b, rows_a, rows_b)).tolist():
        if _same_memory_of_another_order(a, int(rows_a[pair]), b, int(rows_b[pair])):
            found[pair] = ORDER_DIFFERS
    # Last, for it outweighs all: such values are no longer apart by a number.
    found[_counts_differ(a, b, rows_a, rows_b)] = np.inf
    integers = ~(_floating(a)[rows_a] & _floating(b)[rows_b])
    found[integers & (found > 0)] = np.maximum(found[integers & (found > 0)], 1.0)  # integers are not rounded
    return found


def _largest(frame: StepFrame, rows: Ints) -> Floats:
    top: Floats = np.fmax(np.abs(frame.numbers["min"][rows]), np.abs(frame.numbers["max"][rows]))
    return top


def _gap(a: StepFrame, b: StepFrame, rows_a: Ints, rows_b: Ints, name: str) -> Floats:
    first, second = a.numbers[name][rows_a], b.numbers[name][rows_b]
    with np.errstate(invalid="ignore", over="ignore"):
        gap: Floats = np.abs(first - second)
    gap[np.isnan(first) | np.isnan(second)] = 0.0
    return gap


def _sketch_gap(a: StepFrame, b: StepFrame, rows_a: Ints, rows_b: Ints) -> Floats:
    return np.where(same_order(a, b, rows_a, rows_b), _gap(a, b, rows_a, rows_b, "sketch"), 0.0)


def same_order(a: StepFrame, b: StepFrame, rows_a: Ints, rows_b: Ints) -> npt.NDArray[np.bool_]:
    """Return which pairs lie in memory in the same order."""
    first, second = a.texts["layout"], b.texts["layout"]
    numbers = {word: number for number, word in enumerate({*first.words, *second.words})}
    codes = [np.array([numbers[word] for word in text.words] + [-1], dtype=np.int64) for text in (first, second)]
    same: npt.NDArray[np.bool_] = codes[0][first.codes[rows_a]] == codes[1][second.codes[rows_b]]  # -1: the last, none
    return same


def _same_memory_of_another_order(a: StepFrame, row_a: int, b: StepFrame, row_b: int) -> bool:
    """Return whether two rows' memory holds the same numbers in the same order, which their layouts read in other orders."""
    first, second = a.numbers["sketch"][row_a], b.numbers["sketch"][row_b]
    if first != second or a.numbers["min"][row_a] == a.numbers["max"][row_a]:
        return False  # unknown, or of a constant, which is the same in any order
    return _memory_order(a, row_a) != _memory_order(b, row_b)


def _memory_order(frame: StepFrame, row: int) -> list[int]:
    """Return the dimensions of more than one element from the slowest to the quickest."""
    shape, layout = frame.shapes[row], frame.text("layout", row)
    strides = [int(size) for size in layout.split(",") if size.strip().isdigit()] if layout else []
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    return sorted(dims, key=lambda dim: -strides[dim]) if len(strides) == len(shape) else dims


def _relative(gap: Floats, scale: Floats) -> Floats:
    gap = np.where(gap < _TINY, 0.0, gap)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found: Floats = np.where(gap == 0, 0.0, gap / scale)
    return np.nan_to_num(found, nan=np.inf, posinf=np.inf)


def _with_hashes(a: StepFrame, b: StepFrame, rows_a: Ints, rows_b: Ints, found: Floats) -> Floats:
    known = a.hashed[rows_a] & b.hashed[rows_b]
    if not known.any():
        return found
    equal = a.hash[rows_a] == b.hash[rows_b]
    in_order = same_order(a, b, rows_a, rows_b)
    # Statistics of equal bits may differ (another number of threads), and those of other bits may agree.
    found = np.where(known & equal & in_order, 0.0, found)
    found = np.where(known & ~equal & in_order & (found == 0), BITS_DIFFER, found)
    return np.where(known & equal & ~in_order, ORDER_DIFFERS, found)


def _counts_differ(a: StepFrame, b: StepFrame, rows_a: Ints, rows_b: Ints) -> npt.NDArray[np.bool_]:
    differ: npt.NDArray[np.bool_] = a.count[rows_a] != b.count[rows_b]
    for name in ("nan", "pos_inf", "neg_inf"):
        first, second = a.counts[name][rows_a], b.counts[name][rows_b]
        some = (first == AT_LEAST_ONE) | (second == AT_LEAST_ONE)  # as many as in the other run, unless that has none
        known = (first != UNKNOWN) & (second != UNKNOWN)
        differ |= known & np.where(some, (first == 0) | (second == 0), first != second)
    return differ


def _floating(frame: StepFrame) -> npt.NDArray[np.bool_]:
    text = frame.stored
    floats = np.array([word.startswith(("float", "bfloat", "complex")) for word in text.words] or [True], dtype=bool)
    found: npt.NDArray[np.bool_] = (text.codes < 0) | floats[np.maximum(text.codes, 0)]
    return found
