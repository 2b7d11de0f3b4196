"""Gradients that were not zeroed before a step: each is this step's and what the last one left."""

from __future__ import annotations

from collections.abc import Sequence

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.chains import Chain, left_in_gradients
from bitwitness.comparison.measuring.relation import numbers_of

_LEFT = 0.02
"""Relative deviation up to which a gradient is the sum of this step's and the last one's."""
_MOST = 0.9
"""Share of the parameters for which that has to hold."""


def not_zeroed(differences: Differences, chains: Sequence[Chain]) -> str:
    """Say that one run's gradients are the other's and what its own last step left in them, if they are: sketches add up."""
    last = differences.earlier.last
    if last is None:
        return ""
    left_a, left_b = (left_in_gradients(frame) for frame in last)
    rows = [
        ((left_a[c.name], left_b[c.name_b]), c.a[0], c.b[0]) for c in chains if c.name in left_a and c.name_b in left_b
    ]
    if len(rows) < 2:
        return ""
    for side in (0, 1):
        fitting = 0
        for kept, i, j in rows:
            if i is None or j is None:
                return ""
            x, y = numbers_of(differences.a, i), numbers_of(differences.b, j)
            gap = y.sketch - x.sketch - (kept[1] if side else -kept[0])
            size = max(x.l2, y.l2)
            fitting += abs(gap) <= _LEFT * size and abs(y.sketch - x.sketch) > 2 * _LEFT * size
        # Those whose sketch says little, the sum being small by chance, count for neither.
        telling = sum(
            abs(kept[side]) > 2 * _LEFT * numbers_of(differences.a, i).l2 for kept, i, _ in rows if i is not None
        )
        if telling and fitting >= _MOST * telling and fitting >= min(2, len(rows)):
            run = "AB"[side]
            return (
                f"every gradient of run {run} is that of the other run plus what its last step left there: "
                "gradients were not zeroed (zero_grad)"
            )
    return ""
