"""In which other dtype one run computes an operator: where that begins, and not where it is handed on."""

from __future__ import annotations

import numpy as np

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.tokens import CASTS
from bitwitness.comparison.measuring.changes import changes


def other_dtype(differences: Differences, pair: Pair) -> str:
    """Say in which other dtype the result is, or an input that was cast for it; empty if in none, or if all of a run are."""
    if differences.precisions is not None:
        return ""
    for row_a, row_b in (*pair.outputs[:1], *pair.inputs):
        first, second = differences.dtypes(row_a, row_b)
        if first != second and _is_cast_here(differences, pair, row_a, row_b):
            return f"computed in {first} against {second}"
    return ""


def _is_cast_here(differences: Differences, pair: Pair, row_a: int, row_b: int) -> bool:
    """Return whether another dtype begins here: it was not handed on by a matched operator."""
    if (row_a, row_b) in pair.outputs:
        dtypes = [(differences.dtypes(*rows), rows) for rows in pair.inputs]
        return all(first == second or _is_cast_here(differences, pair, *rows) for (first, second), rows in dtypes)
    makers = differences.makers.lone(row_a, row_b)
    return any(maker is not None and maker.op in CASTS for maker in makers)


def given_behind_casts(differences: Differences, row_a: int, row_b: int) -> tuple[int, int, float] | None:
    """Return what casts of one run or both were given, and how far that is apart, if nobody who was recorded made it.

    A batch is cast in the run of the coarser dtype alone: what is read then differs by more than what was given.
    """
    first, second = differences.makers.lone(row_a, row_b)
    given = []
    for row, node in ((row_a, first), (row_b, second)):
        if node is not None and (node.op not in CASTS or not node.inputs):
            return None
        given.append(row if node is None else node.inputs[0])
    i, j = given
    name = differences.a.text("name", i)
    is_given = not name or name.startswith("input ")  # weights are looked at by themselves
    if not is_given or differences.a.producer[i] >= 0 or differences.b.producer[j] >= 0:
        return None
    return i, j, float(changes(differences.a, differences.b, np.array([i]), np.array([j]))[0])
