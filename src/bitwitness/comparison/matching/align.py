"""Which node of one run is which of the other: by module, operator and order, so that an extra one does not shift the rest.

Inside each module (of one phase and micro-batch) the two lists of operators are aligned as two texts are: equal operators
in the same order, those with the same predecessors and shapes rather than others. What lies between two matched ones and
is left over on both sides is one group against another (a fused operator against its parts).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from bitwitness.comparison.matching.alike import exchanged, in_order
from bitwitness.comparison.matching.calls import extra_calls
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.matching.sequences import crossed_of, matches_of
from bitwitness.comparison.matching.tokens import Tokens, may_be_one, renamed

_KEYS = ("kind", "phase", "module", "op", "call", "slot", "micro", "recomputed")

Place = tuple[str, str, str, int]


@dataclass(slots=True)
class Pair:
    """Two nodes that are the same, and their rows: (row of A, row of B) by slot."""

    a: Node
    b: Node
    inputs: list[tuple[int, int]] = field(default_factory=list)
    outputs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_loss(self) -> bool:
        """Whether a backward starts from it."""
        return self.a.kind == "saved" and self.a.op == "loss"

    def is_root(self, phase: str) -> bool:
        """Return whether it is a call of the model itself, in the forward or the backward."""
        return (self.a.kind, self.a.phase, self.a.module) == ("module", phase, ".")


@dataclass(slots=True)
class Group:
    """Nodes of one run that together stand against nodes of the other, between the same neighbours."""

    a: list[Node]
    b: list[Node]


@dataclass(slots=True)
class Alignment:
    """What matches what in one step of one rank."""

    pairs: list[Pair] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    only_a: list[Node] = field(default_factory=list)
    only_b: list[Node] = field(default_factory=list)

    @property
    def weights(self) -> list[Pair]:
        """The parameters that both runs have."""
        return [pair for pair in self.pairs if pair.a.kind == "parameter" and pair.outputs]

    @property
    def losses(self) -> list[Pair]:
        """The losses that both runs' backwards start from."""
        return [pair for pair in self.pairs if pair.is_loss]

    def lone(self, *, first: bool) -> list[Node]:
        """Return the nodes of one run that have no counterpart of their own, those of groups included."""
        groups = [node for group in self.groups for node in (group.a if first else group.b)]
        return [*(self.only_a if first else self.only_b), *groups]


def same_structure(a: StepFrame, b: StepFrame) -> bool:
    """Return whether two steps have the same rows, by all that a site says, of the same shapes."""
    if a.size != b.size:
        return False
    same = all(same_column(a, b, key) for key in _KEYS) and bool(np.array_equal(_ranked(a.node), _ranked(b.node)))
    return same and bool(a.table.column("shape").equals(b.table.column("shape")))


def same_column(a: StepFrame, b: StepFrame, name: str) -> bool:
    """Return whether a column holds the same in two steps of one size."""
    equal = pc.equal(_decoded(a.table.column(name)), _decoded(b.table.column(name)))
    return a.size == 0 or bool(pc.all(equal).as_py())


def _decoded(column: Any) -> Any:
    chunk = column.combine_chunks()
    return pc.fill_null(chunk.dictionary_decode(), "") if hasattr(chunk, "dictionary_decode") else chunk


def _ranked(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return numbers by the order in which they appear first."""
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    ranked: npt.NDArray[np.int64] = order[inverse]
    return ranked


def row_by_row(a: StepFrame, b: StepFrame) -> Alignment:
    """Match two steps of the `same_structure`."""
    nodes = zip(a.nodes, b.nodes, strict=True)
    return Alignment([Pair(x, y, _zipped(x.inputs, y.inputs), _zipped(x.outputs, y.outputs)) for x, y in nodes])


def _zipped(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    return list(zip(a, b, strict=False))


def align(a: StepFrame, b: StepFrame, modules: Mapping[str, str]) -> Alignment:
    """Match two steps; ``modules`` maps module paths of A to those of B."""
    found = Alignment()
    alone = extra_calls(a, b)
    found.only_a, found.only_b = (
        [node for node in f.nodes if node.number in one] for f, one in zip((a, b), alone, strict=True)
    )
    lists_a = _by_place(a, modules, alone[0])
    lists_b = _by_place(b, {}, alone[1])
    tokens_a, tokens_b = Tokens(a, modules), Tokens(b, {})
    sizes = a.sizes_of_modules(modules), b.sizes_of_modules({})
    for backward in (False, True):  # what a backward reads of the forward tells which node of it is which
        tokens_a.matched = {pair.a.number: pair.a.number for pair in found.pairs}
        tokens_b.matched = {pair.b.number: pair.a.number for pair in found.pairs}
        for place in lists_a.keys() | lists_b.keys():
            if (place[:2] == ("op", "backward")) == backward:
                same = backward and sizes[0].get(place[1:], ()) == sizes[1].get(place[1:])
                _align_place(found, a, b, (lists_a.get(place, []), lists_b.get(place, [])), tokens_a, tokens_b, same)
    if modules:
        _match_the_rest(found, a, b, tokens_a, tokens_b)
    found.pairs.sort(key=lambda pair: pair.a.rows[-1])
    for only in (found.only_a, found.only_b):
        only.sort(key=lambda node: node.rows[-1])
    found.groups.sort(key=lambda group: group.a[-1].rows[-1])
    return found


def _align_place(
    found: Alignment,
    a: StepFrame,
    b: StepFrame,
    lists: tuple[list[Node], list[Node]],
    tokens_a: Tokens,
    tokens_b: Tokens,
    same_sizes: bool,
) -> None:
    """Match the nodes of one module and phase; ``same_sizes``: of a backward of a module that returns the same shapes."""
    ours, theirs = lists
    matches = matches_of(ours, theirs, tokens_a, tokens_b)
    is_op = bool(ours) and ours[0].kind == "op"
    lists_and_tokens = ours, theirs, matches, tokens_a, tokens_b
    if is_op and (crossed := crossed_of(*lists_and_tokens) or exchanged(*lists_and_tokens)):
        found.pairs += [_pair(a, b, ours[i], theirs[j]) for i, j in crossed.items()]
        ours = [node for i, node in enumerate(ours) if i not in crossed]
        theirs = [node for j, node in enumerate(theirs) if j not in crossed.values()]
        matches = matches_of(ours, theirs, tokens_a, tokens_b)
    if same_sizes:  # what makes other shapes inside is another way of writing
        matches = [(i, j) for i, j in matches if a.sizes(ours[i])[:1] == b.sizes(theirs[j])[:1]]
    _take(found, a, b, ours, theirs, matches)


def _match_the_rest(found: Alignment, a: StepFrame, b: StepFrame, tokens_a: Tokens, tokens_b: Tokens) -> None:
    """Match what is left over across modules: where modules have other names, what lay in one may lie in another."""
    rest_a, rest_b = (sorted(only, key=lambda node: node.rows[-1]) for only in (found.only_a, found.only_b))
    found.only_a, found.only_b = [], []
    keys = {(node.kind, node.phase, node.micro) for node in [*rest_a, *rest_b]}
    # parameters first: their counterparts tell those of gradients and updates
    for key in sorted(keys, key=lambda key: key[0] != "parameter"):
        ours, theirs = ([n for n in rest if (n.kind, n.phase, n.micro) == key] for rest in (rest_a, rest_b))
        fits = _fits_between(found) if key[0] == "parameter" else _of_matched_parameters(found)
        fit = [
            (i, j)
            for i, j in matches_of(ours, theirs, tokens_a, tokens_b)
            if may_be_one(a, ours[i], b, theirs[j]) and fits(ours[i], theirs[j])
        ]
        _take(found, a, b, ours, theirs, fit)


def _fits_between(found: Alignment) -> Callable[[Node, Node], bool]:
    """Return what tells whether two parameters lie between the same ones of those that are matched: alike in shape are many."""
    known = sorted((pair.a.number, pair.b.number) for pair in found.weights)

    def fits(x: Node, y: Node) -> bool:
        place = bisect_left(known, (x.number, 0))
        after_last = not known[:place] or y.number > known[place - 1][1]
        return after_last and (not known[place:] or y.number < known[place][1])

    return fits


def _of_matched_parameters(found: Alignment) -> Callable[[Node, Node], bool]:
    """Return what tells whether two nodes are of the same parameter, if they are of one; of others nothing is known."""
    names = {pair.a.parameter: pair.b.parameter for pair in found.weights}

    def fits(x: Node, y: Node) -> bool:
        if x.kind not in ("gradient", "optimizer") or not names:
            return True
        mine, other = (node.module if node.kind == "optimizer" else node.parameter for node in (x, y))
        return names.get(mine) == other

    return fits


def _by_place(frame: StepFrame, modules: Mapping[str, str], alone: set[int]) -> dict[Place, list[Node]]:
    """Return nodes by where they are, but for those that are known to have no counterpart."""
    lists: dict[Place, list[Node]] = {}
    for node in frame.nodes:
        if node.number in alone:
            continue
        module = renamed(node, modules)
        # These come once for each parameter and in no order of execution, so they are one list.
        kind = "state" if node.kind in ("parameter", "gradient", "buffer", "optimizer") else node.kind
        lists.setdefault((kind, node.phase, module, node.micro), []).append(node)
    return lists


def _take(
    found: Alignment, a: StepFrame, b: StepFrame, ours: list[Node], theirs: list[Node], matches: list[tuple[int, int]]
) -> None:
    """Add a place's pairs, and what lies between them on both sides or on one."""
    last_i = last_j = 0
    for i, j in [*matches, (len(ours), len(theirs))]:
        left_a, left_b = ours[last_i:i], theirs[last_j:j]
        # Only operators are computed from one another; a module that stands against another says nothing of its parts.
        if left_a and left_b and left_a[0].kind == "op":
            found.groups.append(Group(left_a, left_b))
        else:
            found.only_a += left_a
            found.only_b += left_b
        if i < len(ours):
            found.pairs.append(_pair(a, b, ours[i], theirs[j]))
        last_i, last_j = i + 1, j + 1


def _pair(a: StepFrame, b: StepFrame, x: Node, y: Node) -> Pair:
    pair = Pair(x, y, _by_slot(a, b, x.inputs, y.inputs), _by_slot(a, b, x.outputs, y.outputs))
    if x.op != y.op and len(pair.inputs) > 1:  # another tool's name for it, which may take its inputs in another order
        pair.inputs = _by_shape(a, b, x.inputs, y.inputs)
    # Another class, of whose results some may have nothing to do with the other's:
    if x.op != y.op and x.kind == "module":
        pair.outputs = [(i, j) for i, j in pair.outputs if a.count[i] == b.count[j]] or pair.outputs
    if x.kind == "op":
        pair.inputs = in_order(a, b, x, y, pair.inputs)
    return pair


def _by_slot(a: StepFrame, b: StepFrame, rows_a: list[int], rows_b: list[int]) -> list[tuple[int, int]]:
    slots = {b.text("slot", row): row for row in rows_b}
    pairs = [(row, slots[slot]) for row in rows_a if (slot := a.text("slot", row)) in slots]
    # Other tools call a sole value otherwise, and there is no doubt which it is.
    return pairs or (_zipped(rows_a, rows_b) if len(rows_a) == len(rows_b) == 1 else [])


def _by_shape(a: StepFrame, b: StepFrame, rows_a: list[int], rows_b: list[int]) -> list[tuple[int, int]]:
    """Match inputs by their number of elements, and among equals by their norms."""
    left, pairs = list(rows_b), []
    for row in rows_a:
        fitting = [other for other in left if b.count[other] == a.count[row]]
        if fitting:
            norm = a.numbers["l2"][row]
            best = min(fitting, key=lambda other: abs(b.numbers["l2"][other] - norm))
            pairs.append((row, best))
            left.remove(best)
    return pairs
