"""What a step comes to: its losses, its parameters' gradients, and the buffers that it leaves.

A difference of which nothing is left in these is a way of writing: what is computed for places that a mask takes out, or that
nobody reads, or a batch whose padding is filled otherwise.
"""

from __future__ import annotations

import math

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair

_LEFT, _LEFT_OF_SMALL, _ROUNDED = 1e-4, 1e-3, 8e-6
"""Times a difference, that is nothing of it; the second
of one so small that gradients differ as much by rounding (the third)."""


def leaves_nothing_of(change: float, outcome: float) -> bool:
    """Tell whether what a step comes to differs by next to nothing of a relative ``change`` in it."""
    change = min(change, 1.0)
    return outcome <= min(_LEFT_OF_SMALL * change, max(_LEFT * change, _ROUNDED))


def outcome_of(differences: Differences) -> float:
    """Return by how much losses, gradients and written buffers differ at the most; infinite where that is not known.

    It is not known without gradients or losses, nor where one run alone has a gradient or writes its state.
    """
    pairs = differences.alignment.pairs
    gradients = [pair for pair in pairs if pair.a.kind == "gradient"]
    losses = differences.alignment.losses
    whole = [pair for pair in losses if all(differences.a.count[i] == differences.b.count[j] for i, j in pair.outputs)]
    # One run's is a sum, or goes back in pieces, or unreduced.
    other = differences.makers.other_losses or len(whole) < len(losses)
    if not gradients or not (losses or other) or _has_lone_state(differences):
        return math.inf
    rows = _rows_of_gradients(differences) + [row for pair in losses if not other for row, _ in pair.outputs]
    rows += [row for pair in pairs if pair.a.kind == "op" for row, _ in pair.outputs if differences.a.text("name", row)]
    return max((differences.change_of[row] for row in rows), default=0.0)


def of_gradients(differences: Differences) -> float:
    """Return by how much parameters' gradients differ at the most, complete; infinite where one run alone has one."""
    complete = [row for row in _rows_of_gradients(differences) if differences.a.text("slot", row) == "reduced"]
    alone = _has_lone_state(differences)
    return math.inf if alone or not complete else max(differences.change_of[row] for row in complete)


def _rows_of_gradients(differences: Differences) -> list[int]:
    """Return the rows, in A, of gradients that are more than rounding errors."""
    return [row for pair in gradients_of(differences) for row, _ in pair.outputs]


def gradients_of(differences: Differences) -> list[Pair]:
    """Return the parameters' gradients that are more than rounding errors."""
    told = (pair for pair in differences.alignment.pairs if pair.a.kind == "gradient")
    return [pair for pair in told if not differences.is_cancelled(pair)]


def _has_lone_state(differences: Differences) -> bool:
    for first, frame in ((True, differences.a), (False, differences.b)):
        for node in differences.alignment.lone(first=first):
            if node.kind == "gradient" or (node.kind == "op" and any(frame.text("name", row) for row in node.outputs)):
                return True
    return False
