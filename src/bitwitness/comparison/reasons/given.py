"""What a module is given in one run alone: a mask, a state, several tensors for one."""

from __future__ import annotations

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.measuring.relation import numbers_of


def given_alone(differences: Differences, pair: Pair) -> str:
    """Say what a module is given in one run alone; empty if nothing, or if each run gives something that the other does not.

    What each run gives in a slot of its own may be one thing, by position in one and by name in the other.
    """
    a, b = differences.a, differences.b
    first, second = _given(a, pair.a), _given(b, pair.b)
    alone = [sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys())]
    told = [f"{', '.join(names)} in run {side} alone" for names, side in zip(alone, "AB", strict=True) if names]
    if len(told) != 1:
        return _taken_apart(alone)
    frame, others, mine, theirs = (a, b, first, second) if alone[0] else (b, a, second, first)
    held = [numbers_of(others, row) for row in theirs.values()]
    is_new = any(numbers_of(frame, mine[name]) not in held for name in alone[0] or alone[1])
    return told[0] if is_new else ""


def _given(frame: StepFrame, node: Node) -> dict[str, int]:
    slots = {frame.text("slot", row): row for row in node.inputs}
    return {slot.removeprefix("in."): row for slot, row in slots.items() if slot.startswith("in")}


def _taken_apart(alone: list[list[str]]) -> str:
    """Say that one run gives several tensors where the other gives one: a packed sequence for a padded one."""
    for many, one, run, other in ((*alone, "A", "B"), (*alone[::-1], "B", "A")):
        if len(one) == 1 and len(many) > 1 and all(name.startswith(f"{one[0]}.") for name in many):
            return f"{one[0]} is {len(many)} tensors in run {run} (a packed sequence, a tuple) and one in run {other}"
    return ""
