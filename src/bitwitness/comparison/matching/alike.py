"""Which operators read the same values in both runs: of several of a kind, in one place, values tell which is which.

Two lines of a script that are exchanged, or a product's factors, are no difference, and by their order alone a healthy operator
would be held against another.
"""

from __future__ import annotations

import math
from typing import Any

from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.matching.tokens import Tokens
from bitwitness.oracle.names import canonical

SAME = 1e-4
"""Relative difference of statistics up to which values are the same but for rounding."""
_OTHER = 0.02
"""And from which on they are others."""
_NEARER = 0.02
"""Times the difference from its counterpart, up to which another one is nearer by far."""
_MOST = 256
"""Operators of one kind in one module that are held against one another."""
_COMMUTATIVE = ("add", "logaddexp", "maximum", "minimum", "mul")


def exchanged(
    ours: list[Node], theirs: list[Node], matches: list[tuple[int, int]], a: Tokens, b: Tokens
) -> dict[int, int]:
    """Return, by their positions, operators of a forward that read others' values than their counterparts, with whom they go.

    Those are of the same operator, arguments and shapes, and read the same values but for rounding.
    """
    partners = dict(matches)
    free: dict[Any, list[int]] = {}
    back = {j: i for i, j in matches}
    for j, node in enumerate(theirs):
        if _is_one(node) and (j not in back or _gap(a.frame, ours[back[j]], b.frame, node) > _OTHER):
            free.setdefault(_kind(b, node), []).append(j)
    found: dict[int, int] = {}
    for i, node in enumerate(ours):
        if not _is_one(node) or not (left := free.get(_kind(a, node), [])) or len(left) > _MOST:
            continue
        partner = _gap(a.frame, node, b.frame, theirs[partners[i]]) if i in partners else 0.0
        if i in partners and partner <= _OTHER:
            continue
        gap, fit = min((_gap(a.frame, node, b.frame, theirs[j]), j) for j in left)
        # By a later step, rounding has moved the weights apart: what is nearer by far is the same.
        if gap <= max(SAME, _NEARER * partner if partner < math.inf else 0.0):
            found[i] = fit
            left.remove(fit)
    return found


def in_order(a: StepFrame, b: StepFrame, x: Node, y: Node, inputs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the inputs of one operator of both runs, matched by their values where their order does not matter."""
    if canonical(x.op) not in _COMMUTATIVE or len(inputs) != 2:
        return inputs
    if any('"alpha":' in frame.text("args", node.rows[0]) for frame, node in ((a, x), (b, y))):
        return inputs  # one of two that are added is multiplied before
    (first, other_first), (second, other_second) = inputs
    crossed = [(first, other_second), (second, other_first)]
    if max(row_gap(a, i, b, j) for i, j in crossed) <= SAME and max(row_gap(a, i, b, j) for i, j in inputs) > _OTHER:
        return crossed
    return inputs


def _is_one(node: Node) -> bool:
    return (node.kind, node.phase) == ("op", "forward") and bool(node.inputs)


def _kind(tokens: Tokens, node: Node) -> Any:
    return tokens.op(node), tokens.shapes(node), tokens.args(node)


def _gap(a: StepFrame, x: Node, b: StepFrame, y: Node) -> float:
    """Return how far apart what two operators read is, by statistics; infinite where nothing is known."""
    if len(x.inputs) != len(y.inputs):
        return float("inf")
    return max(row_gap(a, i, b, j) for i, j in zip(x.inputs, y.inputs, strict=True))


def row_gap(a: StepFrame, i: int, b: StepFrame, j: int) -> float:
    """Return how far apart two rows are, by statistics, relative to their size; infinite where they cannot be one."""
    if a.count[i] != b.count[j]:
        return float("inf")
    size = max(float(a.numbers["l2"][i]), float(b.numbers["l2"][j]))
    root = float(a.count[i]) ** 0.5
    if size == 0.0:
        return 0.0
    scales = {"l2": 1.0, "mean": root, "min": 1.0, "max": 1.0, "sketch": 1.0}
    gaps = [abs(float(a.numbers[n][i]) - float(b.numbers[n][j])) * scale / size for n, scale in scales.items()]
    known = [gap for gap in gaps if gap == gap]  # noqa: PLR0124 - not those that one run has not
    return max(known) if len(known) > 1 else float("inf")
