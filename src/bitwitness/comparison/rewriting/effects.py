"""Where a difference ends: all that an operator leads to comes to results that agree, so that it is a way of writing.

The values that an operator's results flow into are followed, through operators that only one run has and through matched ones
whose results differ, up to matched results that agree within rounding. A path that ends in a gradient, an update or a value
of which nobody knows who read it has no such end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cached_property

from bitwitness.comparison.differences import FINE, Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.measuring.allowance import roundoff
from bitwitness.comparison.measuring.relation import is_filled

_ENOUGH = 16
"""Numbers whose agreement tells that nothing is left of a difference: fewer may agree by chance."""
_ANOTHER = 1e-4
"""Relative change of a gradient that is more than a way of writing leaves."""
_MOST = 10_000
"""Nodes that are followed; a way of writing is not longer."""


class Effects:
    """Follows what one operator's results lead to, in one step of one rank.

    Parameters
    ----------
    differences
        The step.
    agree
        Tells whether two rows, of A and B, agree within rounding.

    """

    def __init__(self, differences: Differences, agree: Callable[[int, int], bool]) -> None:
        self._differences = differences
        self._agree = agree

    def end(self, node: Node, *, first: bool) -> set[int] | None:
        """Return where all that a node of run A (``first``) or B leads to ends; None if something of it does not.

        Returns
        -------
        set of int
            Numbers, in A, of the matched nodes whose results agree.

        """
        frame = self._differences.a if first else self._differences.b
        readers, pairs = (self._readers_a, self._pairs_a) if first else (self._readers_b, self._pairs_b)
        ends: set[int] = set()
        passed_over = False
        seen, waiting = {node.number}, [node]
        while waiting:
            if len(seen) > _MOST:
                return None
            one = waiting.pop()
            found = readers.get(one.number, [])
            if not found and (one is node or any(_is_large(frame, row) for row in one.outputs)):
                return None  # what read it was not recorded
            for reader in found:
                if self._is_given_another(node, reader, seen, first=first):
                    passed_over = True
                    continue
                pair = pairs.get(reader.number)
                if pair is not None and self._tells(pair, one.number, first=first):
                    ends.add(pair.a.number)
                elif reader.kind != "op":
                    return None
                elif reader.number not in seen:
                    seen.add(reader.number)
                    waiting.append(reader)
        return None if passed_over and not ends else ends

    def _is_given_another(self, node: Node, reader: Node, seen: set[int], *, first: bool) -> bool:
        """Return whether an operator of the backward, which reads what a forward's made, is given another gradient anyway.

        It tells nothing then: what differs further on changes all gradients before it. Where coarse rounding may hide a
        difference in the forward, gradients are what tells of it.
        """
        coarse = max(self._differences.coarse, self._differences.rewritten, self._differences.roundoff_inside) > FINE
        if node.phase != "forward" or reader.phase != "backward" or coarse:
            return False
        frame = self._differences.a if first else self._differences.b
        changes = self._changes_a if first else self._changes_b
        others = [row for row in reader.inputs if int(frame.producer[row]) not in seen]
        return any(changes.get(int(frame.value[row]), 0.0) > _ANOTHER for row in others)

    @cached_property
    def _changes_a(self) -> dict[int, float]:
        """How far values are apart of which both runs know who made them, by their numbers in A."""
        a, change_of = self._differences.a, self._differences.change_of
        return {int(a.value[i]): change_of[i] for pair in self._differences.alignment.pairs for i, _ in pair.outputs}

    @cached_property
    def _changes_b(self) -> dict[int, float]:
        b, change_of = self._differences.b, self._differences.change_of
        return {int(b.value[j]): change_of[i] for pair in self._differences.alignment.pairs for i, j in pair.outputs}

    def _tells(self, pair: Pair, maker: int, *, first: bool) -> bool:
        """Return whether the results of a pair agree, and would not if something of a difference were left.

        Of a few numbers, as a bias's gradient has, what was summed up to them tells: the values of ``maker``.
        """
        if not all(self._agree(*rows) for rows in pair.outputs):
            return False
        if any(is_filled(self._differences.a, row) for row, _ in pair.outputs):
            return False  # beside what masks are filled with, whatever else is there agrees
        if pair.a.kind != "op" or any(self._is_telling(row) for row, _ in pair.outputs):
            return True
        made = (self._differences.a if first else self._differences.b).producer
        read = [(i, j) for i, j in pair.inputs if int(made[i if first else j]) == maker]
        return bool(read) and all(self._is_telling(i) and self._agree(i, j) for i, j in read)

    def _is_telling(self, row: int) -> bool:
        a = self._differences.a
        return _is_large(a, row) and bool(a.numbers["min"][row] < a.numbers["max"][row])

    @cached_property
    def _pairs_a(self) -> dict[int, Pair]:
        return {pair.a.number: pair for pair in self._differences.alignment.pairs}

    @cached_property
    def _pairs_b(self) -> dict[int, Pair]:
        return {pair.b.number: pair for pair in self._differences.alignment.pairs}

    @cached_property
    def _readers_a(self) -> dict[int, list[Node]]:
        return _readers(self._differences.a)

    @cached_property
    def _readers_b(self) -> dict[int, list[Node]]:
        return _readers(self._differences.b)


def _is_large(frame: StepFrame, row: int) -> bool:
    return bool(frame.count[row] >= _ENOUGH and roundoff(frame.text("dtype", row)) > 0.0)


def _readers(frame: StepFrame) -> dict[int, list[Node]]:
    """Return who reads what each node made; modules hand on what is in them, and read nothing themselves."""
    found: defaultdict[int, list[Node]] = defaultdict(list)
    for node in frame.nodes:
        if node.kind != "module":
            for number in {int(frame.producer[row]) for row in node.rows} - {-1, node.number}:
                found[number].append(node)
    return found
