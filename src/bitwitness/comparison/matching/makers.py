"""Who made a value: a node that both runs have, or one that only one of them has; and what that was made of."""

from __future__ import annotations

from functools import cached_property

from bitwitness.comparison.matching.align import Alignment, Group, Pair
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.matching.tokens import CASTS
from bitwitness.oracle.names import canonical

_FOLLOWED = 256
"""Nodes of one run alone that are followed to what they are made of."""


class Makers:
    """Knows the makers of one step's values, in both runs.

    Parameters
    ----------
    a, b
        The two steps.
    alignment
        What matches what.

    """

    def __init__(self, a: StepFrame, b: StepFrame, alignment: Alignment) -> None:
        self._frames = a, b
        pairs = [pair for pair in alignment.pairs if pair.outputs]
        self.made = {pair.a.number: pair for pair in pairs}, {pair.b.number: pair for pair in pairs}
        """Matched nodes that made something, by their numbers in A and in B."""
        self._lone = tuple({node.number: node for node in alignment.lone(first=first)} for first in (True, False))
        groups_a = {node.number: group for group in alignment.groups for node in group.a}
        groups_b = {node.number: group for group in alignment.groups for node in group.b}
        self._groups = groups_a, groups_b

    def maker(self, row_a: int) -> Pair | None:
        """Return the matched node that made a row of A, if that is known."""
        return self.made[0].get(int(self._frames[0].producer[row_a]))

    @cached_property
    def _nodes(self) -> tuple[dict[int, Node], ...]:
        return tuple({node.number: node for node in frame.nodes} for frame in self._frames)

    def made_in_both(self, row: int, *, first: bool) -> bool:
        """Return whether a row of run A (``first``) or of run B was made by a node whose same result the other run has, too.

        Of what is added up over micro-batches, each.
        """
        frame, side = self._frames[not first], int(not first)
        made = self._nodes[side].get(int(frame.producer[row]))
        if made is not None and canonical(made.op) == "add":
            parts = [one for one in made.inputs if frame.producer[one] >= 0]
            return bool(parts) and all(self.made_in_both(one, first=first) for one in parts)
        pair = self.made[side].get(int(frame.producer[row]))
        if pair is None or len(pair.a.outputs) != len(pair.b.outputs):  # of a frozen weight there is none
            return False
        return any(frame.value[rows[side]] == frame.value[row] for rows in pair.outputs)

    def lone(self, row_a: int, row_b: int) -> tuple[Node | None, Node | None]:
        """Return the nodes of A and of B that made these rows, each only if the other run has no such node."""
        a, b = self._frames
        return self._lone[0].get(int(a.producer[row_a])), self._lone[1].get(int(b.producer[row_b]))

    def lone_near(self, pair: Pair, row_a: int, row_b: int) -> tuple[Node | None, Node | None]:
        """Return the same of what a pair reads; of two in different modules the one alone that lies in the reader's own.

        The other is inside a module that is written otherwise, and what came out of that was changed on its way to the reader.
        """
        lone_a, lone_b = self.lone(row_a, row_b)
        if lone_a is None or lone_b is None or lone_a.module == lone_b.module:
            return lone_a, lone_b
        near = lone_a.module == pair.a.module, lone_b.module == pair.b.module
        return (lone_a, lone_b) if near[0] == near[1] else (lone_a if near[0] else None, lone_b if near[1] else None)

    def group(self, lone: Node, *, first: bool) -> Group | None:
        """Return the nodes that stand against each other in both runs, a node that only one has among them."""
        return self._groups[0 if first else 1].get(lone.number)

    def common_group(self, row_a: int, row_b: int) -> Group | None:
        """Return the nodes that stand against each other in both runs, among which are the makers of these two rows."""
        a, b = self._frames
        first, second = self._groups[0].get(int(a.producer[row_a])), self._groups[1].get(int(b.producer[row_b]))
        return first if first is second else None

    def beginning(self, lone: Node, *, first: bool) -> tuple[Node, int]:
        """Return where a path of the backward begins that one run alone has, and how many nodes it has.

        It ends in a sum of gradients, where it meets one that both runs have; of any other node it is the node itself.
        """
        frame, alone, made = self._frames[not first], self._lone[not first], self.made[not first]
        makers = [int(frame.producer[row]) for row in lone.inputs]
        meets = any(number in alone for number in makers) and any(number in made for number in makers)
        if lone.phase != "backward" or canonical(lone.op) != "add" or not meets:
            return lone, 1
        waiting, seen = [lone], {lone.number: lone}
        while waiting and len(seen) < _FOLLOWED:
            found = (alone.get(int(frame.producer[row])) for row in waiting.pop().inputs)
            new = {node.number: node for node in found if node is not None and node.phase == "backward"}
            waiting += [node for number, node in new.items() if number not in seen]
            seen |= new
        known = [node for node in seen.values() if frame.stack[node.rows[0]] >= 0]
        return min(known, key=lambda node: node.rows[0], default=lone), len(seen)

    def behind_casts(self, row_a: int, row_b: int) -> int:
        """Return the number in A of the matched node that made two rows, where one run may have cast its result; or -1."""
        found = []
        for side, row in enumerate((row_a, row_b)):
            number = int(self._frames[side].producer[row])
            cast = self._lone[side].get(number)
            if cast is not None and cast.op in CASTS and cast.inputs:
                number = self._read_by(cast, side)
            pair = self.made[side].get(number)
            found.append(-1 if pair is None else pair.a.number)
        return found[0] if found[0] == found[1] else -1

    def behind_cast(self, cast: Node, *, first: bool) -> Node | None:
        """Return the node that made what a cast of one run reads, if that run alone has it, too."""
        made = self._lone[not first].get(self._read_by(cast, int(not first)))
        return None if made is None or made.op in CASTS else made

    def _read_by(self, node: Node, side: int) -> int:
        """Return the number of the node that made what another reads first; -1 where nobody is known to have."""
        return int(self._frames[side].producer[node.inputs[0]]) if node.inputs else -1

    def has_lone(self, kind: str, op: str) -> bool:
        """Return whether one run alone has such a node."""
        return any(node.kind == kind and node.op == op for lone in self._lone for node in lone.values())

    @cached_property
    def other_losses(self) -> bool:
        """Whether the runs' backwards start from other numbers of losses."""
        return self.has_lone("saved", "loss")

    def origins(self, lone: Node, *, first: bool) -> tuple[list[Pair], set[str]]:
        """Return what led to a node that only run A (``first``) or only run B has: matched nodes, and what has a name.

        It is followed through nodes that only that run has.
        """
        side = 0 if first else 1
        frame, made, alone = self._frames[side], self.made[side], self._lone[side]
        pairs: list[Pair] = []
        names: set[str] = set()
        waiting, seen = [lone], {lone.number}
        while waiting and len(seen) < _FOLLOWED:
            for row in waiting.pop().inputs:
                number = int(frame.producer[row])
                if name := frame.text("name", row):
                    names.add(name)
                elif number in made:
                    pairs.append(made[number])
                elif number in alone and number not in seen:
                    seen.add(number)
                    waiting.append(alone[number])
        return pairs, names
