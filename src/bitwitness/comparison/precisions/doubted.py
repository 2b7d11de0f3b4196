"""Operators that rounding of a coarse dtype might explain, and which are to be asked all the same.

Where two runs compute in different precisions, an operator's inputs differ, and what they explain grows along the depth. A
result that differs by several times what each of its inputs does is the one to compute again in float64, from its own inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwitness.comparison.differences import FINE, Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.measuring.values import KeptValues
from bitwitness.comparison.suspect import Suspect, suspect_of
from bitwitness.oracle.names import PRODUCTS, canonical, is_random

_TIMES = 1.5
"""Times its inputs' changes. Healthy products were seen to differ by up to twice as much, in bfloat16 against float32: of some
that are asked float64 says that they are right."""
_LEAST = 2.0
"""Unit roundoffs of the coarser dtype that it has to differ by."""


def contradicted(differences: Differences, values: KeptValues | None, rank: int, step: int) -> list[Suspect]:
    """Return the first operator that float64 contradicts, if there is one."""
    if values is None or differences.precisions is None or differences.parted_before:
        return []
    found = ((one, values.refine(one)) for one in _doubted(differences, rank, step))
    return next(([told] for one, told in found if told is not None and told is not one), [])


def _doubted(differences: Differences, rank: int, step: int) -> Iterator[Suspect]:
    """Yield the operators to compute again, in the order of execution."""
    least = _LEAST * differences.roundoff_inside
    for pair in differences.alignment.pairs:
        if pair.a.kind != "op" or not pair.outputs or not pair.inputs or not _can_be_asked(differences, pair):
            continue
        out, change = max(enumerate(differences.change_of[i] for i, _ in pair.outputs), key=lambda one: one[1])
        explained = max(least, _TIMES * max(differences.change_of[i] for i, _ in pair.inputs))
        if change > explained:
            text = "it differs by more than its inputs and its rounding explain"
            yield suspect_of(
                pair, differences.a, pair.outputs[out][0], rank=rank, step=step, reason="computed", text=text, change=change,
                explained=explained,
            )  # fmt: skip


def _can_be_asked(differences: Differences, pair: Pair) -> bool:
    """Return whether float64 knows what rounding leaves: not of backwards of norms and attention, which add up coarsely."""
    if canonical(pair.a.op) in PRODUCTS:
        return True
    if "embedding" in pair.a.op and pair.a.phase == "backward":
        return differences.roundoff(*pair.outputs[0]) <= FINE  # a sum in the dtype itself
    counts = [[int(differences.a.count[i]) for i, _ in rows] for rows in (pair.inputs, pair.outputs)]
    element_by_element = len(pair.outputs) == 1 and counts[1][0] >= max(counts[0])
    return not is_random(pair.a.op) and (pair.a.phase == "forward" or element_by_element)
