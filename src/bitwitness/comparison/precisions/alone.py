"""A module's backward that one run computes by more operators, of two runs in different precisions with the same forward.

The rounding of so coarse a dtype explains of single operators that a term is missing there. But a backward follows from its
forward, unless somebody wrote it by hand; and what becomes of a missing term is seen at the module's two ends.
"""

from __future__ import annotations

from collections import defaultdict

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.scalers import scales_of
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import Node
from bitwitness.comparison.measuring.describe import in_chain
from bitwitness.comparison.precisions.otherwise import computing
from bitwitness.comparison.suspect import Suspect, suspect_of
from bitwitness.oracle.names import canonical

_GATHERS = ("add", "sum", "div")
"""Operators that put gradients together or apart, in whatever number a cast stands between them."""
_LEAST = 2
"""Others of which a formula is made, at least."""
_FAR, _LEAST_FAR = 3.0, 4.0
"""Times what comes in differs by, and unit roundoffs of the coarser precision, that what is handed back differs by then."""


def backward_alone(differences: Differences, rank: int, step: int) -> list[Suspect]:
    """Return the first module in whose backward one run alone computes a formula, where what it hands back is far off."""
    if differences.precisions is None or differences.parted_before:
        return []
    alone = _computed_alone(differences)
    for pair in differences.alignment.pairs:
        if (pair.a.kind, pair.a.phase) != ("module", "backward") or pair.a.module not in alone:
            continue
        nodes, first = alone[pair.a.module]
        if (found := _far_off(differences, pair)) is None:
            continue
        row, change, explained = found
        run, other = ("A", "B") if first else ("B", "A")
        text = (
            f"only run {run} computes {in_chain(nodes)} in its backward, whose forward is the same in run {other}, and what "
            "it hands back differs by more than what comes in: another backward (of a function of one's own, say)"
        )
        return [
            suspect_of(
                pair, differences.a, row, rank=rank, step=step, reason="missing", text=text,
                change=change, explained=explained,
            )
        ]  # fmt: skip
    return []


def _far_off(differences: Differences, pair: Pair) -> tuple[int, float, float] | None:
    """Return the row that a module hands back which differs by more than is explained, by how much, and what is."""
    comes_in = max((differences.change_of[row] for row, _ in pair.inputs), default=0.0)
    limit = max(_FAR * comes_in, _LEAST_FAR * differences.roundoff_inside)
    change, row = max(((differences.change_of[row], row) for row, _ in pair.outputs), default=(0.0, -1))
    return (row, change, limit) if pair.inputs and change > limit else None


def _computed_alone(differences: Differences) -> dict[str, tuple[list[Node], bool]]:
    """Return what one run alone computes in modules' backwards, by module, and whether that is A; nothing of forwards."""
    found: dict[str, dict[bool, list[Node]]] = defaultdict(lambda: {True: [], False: []})
    otherwise: set[str] = set()
    for first, frame in ((True, differences.a), (False, differences.b)):
        for node in computing(differences.alignment.lone(first=first)):
            if node.kind != "op" or scales_of(frame, node):
                continue
            if node.phase == "backward":
                found[node.module][first].append(node)
            elif not node.recomputed:
                otherwise.add(node.module)
    alone = {}
    for module, sides in found.items():
        first = bool(sides[True])
        formula = [node for node in sides[first] if canonical(node.op) not in _GATHERS]
        if module not in otherwise and not (sides[True] and sides[False]) and len(formula) >= _LEAST:
            alone[module] = sides[first], first
    return alone
