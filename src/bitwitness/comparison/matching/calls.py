"""Calls of the model that only one run has: known by what the others are given.

Where one run calls its model twice in a step and the other once with gradients, by their order the first calls would be held
against one another, which are given other things.
"""

from __future__ import annotations

from typing import NamedTuple

from bitwitness.comparison.matching.alike import SAME, row_gap
from bitwitness.comparison.matching.frame import Node, StepFrame


class _Call(NamedTuple):
    """A call of the root: what it ran, and the rows of what it was given."""

    nodes: list[int]
    given: list[int]


def extra_calls(a: StepFrame, b: StepFrame) -> tuple[set[int], set[int]]:
    """Return the numbers of the forward's nodes, in A and in B, of calls that only that run has; most often none.

    Only where each call of the other run is given the same as one of these, in the same order.
    """
    alone: tuple[set[int], set[int]] = set(), set()
    calls_a, calls_b = _calls(a), _calls(b)
    for micro in calls_a.keys() & calls_b.keys():
        ours, theirs = calls_a[micro], calls_b[micro]
        if len(ours) > len(theirs):
            alone[0].update(_left_over(b, theirs, a, ours))
        elif len(theirs) > len(ours):
            alone[1].update(_left_over(a, ours, b, theirs))
    return alone


def _left_over(few: StepFrame, calls: list[_Call], many: StepFrame, more: list[_Call]) -> set[int]:
    """Return the nodes of those of more calls that fewer ones do not go with; none where one of these goes with none."""
    extra, rest = set[int](), iter(more)
    for call in calls:
        for other in rest:
            if _given_alike(few, call, many, other):
                break
            extra.update(other.nodes)
        else:
            return set()
    return extra.union(*(other.nodes for other in rest))


def _given_alike(a: StepFrame, x: _Call, b: StepFrame, y: _Call) -> bool:
    if not x.given or len(x.given) != len(y.given):
        return False
    return all(row_gap(a, i, b, j) <= SAME for i, j in zip(x.given, y.given, strict=True))


def _calls(frame: StepFrame) -> dict[int, list[_Call]]:
    """Return the calls of the root by micro-batch, in order; what the script computes between two is of none."""
    found: dict[int, list[_Call]] = {}
    running: dict[int, list[int]] = {}
    for node in frame.nodes:
        if node.phase != "forward" or node.kind not in ("op", "module") or node.recomputed:
            continue
        inside = running.setdefault(node.micro, [])
        if inside or node.module != "." or _reads_input(frame, node):
            inside.append(node.number)
        if (node.kind, node.module) == ("module", "."):
            found.setdefault(node.micro, []).append(_Call(running.pop(node.micro), node.inputs))
    return found


def _reads_input(frame: StepFrame, node: Node) -> bool:
    return any((frame.texts["name"][row] or "").startswith("input ") for row in node.inputs)
