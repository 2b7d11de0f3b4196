"""Micro-batches or ranks that weigh otherwise, or losses that are not one function: results agree, and gradients do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.losses import computed_otherwise
from bitwitness.comparison.rewriting.settled import SettledModules

_MOST = 0.9
"""Share of the gradients that have to differ: a few have gradients that are rounding errors."""


class Weighed(NamedTuple):
    """What is said of them; ``side`` and ``stack``: the run and the call that it comes from, where that is known."""

    kind: str
    text: str
    side: str = ""
    stack: int = -1


def weigh_otherwise(differences: Differences, gradients: Sequence[int | None], least: float) -> Weighed | None:
    """Return that micro-batches or ranks weigh otherwise, if all that the forward returned agrees.

    ``gradients``: their rows in A, complete; ``least``: the relative change from which on one differs.
    """
    a, b = differences.a, differences.b
    counts = next((pair for pair in ((a.micros, b.micros), (a.ranks, b.ranks)) if pair[0] != pair[1]), None)
    rows = [row for row in gradients if row in differences.change_of]
    apart = sum(differences.change_of[row] > least for row in rows if row is not None)
    if counts is None or apart < _MOST * len(rows) or not SettledModules(differences).forward_agrees:
        return None
    said = f"gradients ({apart} of {len(rows)}) differ by no one factor although all that the forward returned agrees"
    if loss := computed_otherwise(a, b):
        return Weighed(
            "loss", f"{said}: {loss.text}, so that these may not be the same function", loss.side, loss.stack
        )
    what = "micro-batches" if a.micros != b.micros else "ranks"
    text = (
        f"{said}: run A's {counts[0]} and run B's {counts[1]} {what} weigh otherwise (a mean of means is not the mean "
        "over all samples or tokens), or their losses are not the same function"
    )
    return Weighed("weighed", text)
