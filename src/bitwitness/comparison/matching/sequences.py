"""Two lists of nodes aligned as two texts are, and what lies in another order in each run."""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np

from bitwitness.comparison.matching.frame import Node
from bitwitness.comparison.matching.tokens import Tokens

_LONGEST = 400
"""Nodes of one module, beyond which lists are aligned by operators alone: the table of all else grows with their square."""


def matches_of(ours: list[Node], theirs: list[Node], a: Tokens, b: Tokens) -> list[tuple[int, int]]:
    """Return the matched positions of two lists, ascending."""
    ops_a, ops_b = [a.word(node) for node in ours], [b.word(node) for node in theirs]
    if ops_a == ops_b:  # the usual case, and far cheaper
        return [(i, i) for i in range(len(ours))]
    if max(len(ours), len(theirs)) > _LONGEST:
        blocks = difflib.SequenceMatcher(None, ops_a, ops_b, autojunk=False).get_matching_blocks()
        return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
    return _best(ours, theirs, ops_a, ops_b, a, b)


def _best(
    ours: list[Node], theirs: list[Node], ops_a: list[str], ops_b: list[str], a: Tokens, b: Tokens
) -> list[tuple[int, int]]:
    """Align by the method of Needleman and Wunsch (1970): a match scores 3 and less than 3 for likeness, a gap nothing."""
    rows, columns = len(ours), len(theirs)
    score = np.zeros((rows + 1, columns + 1))
    gain: dict[tuple[int, int], float] = {}
    for i in range(rows - 1, -1, -1):
        for j in range(columns - 1, -1, -1):
            best = max(score[i + 1, j], score[i, j + 1])
            if ops_a[i] == ops_b[j] and (likeness := a.likeness(ours[i], theirs[j], b)) is not None:
                # A match outweighs any likeness: two nodes of one operator and shape are never left over side by side.
                gain[i, j] = 3.0 + likeness
                best = max(best, score[i + 1, j + 1] + gain[i, j])
            score[i, j] = best
    matches, i, j = [], 0, 0
    while i < rows and j < columns:
        if (i, j) in gain and score[i, j] == score[i + 1, j + 1] + gain[i, j]:
            matches.append((i, j))
            i, j = i + 1, j + 1
        elif score[i, j] == score[i + 1, j]:
            i += 1
        else:
            j += 1
    return matches


def crossed_of(
    ours: list[Node], theirs: list[Node], matches: list[tuple[int, int]], a: Tokens, b: Tokens
) -> dict[int, int]:
    """Return, by their positions, the nodes that match and are in another order in each run: of a backward, and casts.

    Autograd calls the parts of a node in an order of its own: a layer's product for its weight comes before or after that for
    its input. What would match a node of other shapes, or none, matches one of its own operator and shapes; of several with
    the same shapes, the one whose inputs the same operators made.
    """

    def key(tokens: Tokens, node: Node) -> Any:
        if node.phase == "backward":
            return tokens.op(node), tokens.shapes(node)
        cast = tokens.cast(node)
        return (cast, tokens.shapes(node)) if cast else None

    fitting = [(i, j) for i, j in matches if a.shapes(ours[i]) == b.shapes(theirs[j])]
    fixed_a, fixed_b = {i for i, _ in fitting}, {j for _, j in fitting}
    free: dict[Any, list[int]] = {}
    for j, node in enumerate(theirs):
        if j not in fixed_b:
            free.setdefault(key(b, node), []).append(j)
    free.pop(None, None)
    crossed: dict[int, int] = {}
    for i, node in enumerate(ours):
        if i not in fixed_a and (fit := free.get(key(a, node))):
            crossed[i] = fit.pop(0)
    return crossed | _exchanged(ours, theirs, [(i, j) for i, j in fitting if ours[i].phase == "backward"], a, b)


def _exchanged(
    ours: list[Node], theirs: list[Node], matches: list[tuple[int, int]], a: Tokens, b: Tokens
) -> dict[int, int]:
    """Return, by their positions, matched nodes of which each fits another's counterpart: all shapes are the same."""
    alike: dict[Any, list[tuple[int, int]]] = {}
    for i, j in matches:
        alike.setdefault((a.op(ours[i]), a.shapes(ours[i])), []).append((i, j))
    exchanged: dict[int, int] = {}
    for places in alike.values():
        doubtful = [(i, j) for i, j in places if len(places) > 1 and a.makers(ours[i]) != b.makers(theirs[j])]
        left = {j: b.makers(theirs[j]) for _, j in doubtful}
        for i, _ in doubtful:
            made = a.makers(ours[i])
            if (fit := next((j for j, other in left.items() if other == made), None)) is not None:
                exchanged[i] = fit
                del left[fit]
    return exchanged
