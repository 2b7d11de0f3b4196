"""What an operator read: which parameter or which result, and whether that is the same in both runs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import NamedTuple

from bitwitness.comparison.matching.align import Alignment, Pair
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.matching.makers import Makers


class Operand(NamedTuple):
    """Where a value is from: a name (a parameter, a buffer, a model's input), or a node of run A and its result's place.

    ``node`` is -1 for what has a name; ``place`` is None for a part of a result, or for another view of it.
    """

    name: str
    node: int
    place: int | None
    text: str


class Operands:
    """Knows where the values of one step come from, in both runs, by run A's names and nodes.

    Parameters
    ----------
    a, b
        The two steps.
    alignment, makers
        What matches what, and what made what.

    """

    def __init__(self, a: StepFrame, b: StepFrame, alignment: Alignment, makers: Makers) -> None:
        self._a = a
        self._b = b
        sent = [
            pair for pair in alignment.pairs if pair.a.kind == "collective"
        ]  # eager ones return nothing that is there yet
        self._made_a = ChainMap(makers.made[0], {pair.a.number: pair for pair in sent})
        self._made_b = ChainMap(makers.made[1], {pair.b.number: pair for pair in sent})
        state = [rows for pair in alignment.pairs if pair.a.kind in ("parameter", "buffer") for rows in pair.outputs]
        self._named = {b.text("name", j): a.text("name", i) for i, j in state}

    def other(self, row_a: int, row_b: int) -> tuple[Operand, Operand] | None:
        """Return what each run reads there; None where it is the same, or where that is not known."""
        first = _operand(self._a, row_a, self._made_a, first=True, names={})
        second = _operand(self._b, row_b, self._made_b, first=False, names=self._named)
        if first is None or second is None:
            return None
        known = None not in (first.place, second.place)
        if first.name == second.name and first.node == second.node and (first.place == second.place or not known):
            return None
        return first, second


def _operand(
    frame: StepFrame, row: int, made: Mapping[int, Pair], *, first: bool, names: Mapping[str, str]
) -> Operand | None:
    name = frame.text("name", row)
    if name:
        return Operand(names.get(name, name), -1, None, name)
    pair = made.get(int(frame.producer[row]))
    if pair is None:
        return None  # nobody recorded made it, or one that only this run has
    node = pair.a if first else pair.b
    if not node.outputs:
        return Operand("", pair.a.number, None, node.site)
    value = int(frame.value[row])
    place = next((i for i, out in enumerate(node.outputs) if int(frame.value[out]) == value), None)
    slot = frame.text("slot", node.outputs[place or 0])
    return Operand("", pair.a.number, place, f"{node.site}{'' if place is None else f'.{slot}'}")
