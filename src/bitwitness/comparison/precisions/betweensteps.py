"""Weights that one run alone writes between two steps, where the runs compute in different precisions.

How far weights have moved apart by rounding hides such a write from a look at both runs. Within one run nothing is rounded: a
step begins with the very weights that the optimizer left, unless somebody has written them since.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bitwitness.comparison.differences import NEGLIGIBLE, Differences
from bitwitness.comparison.gradients.absent import last_updates, weights_begun
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.changes import changes
from bitwitness.comparison.measuring.relation import and_so
from bitwitness.comparison.suspect import Suspect
from bitwitness.site import Site


def written_between(differences: Differences, rank: int, step: int) -> Iterator[Suspect]:
    """Yield the first of such weights as a suspect, if there is one: it comes before all that the step computes."""
    if differences.precisions is None or differences.earlier.last is None or differences.parted_before:
        return
    found = [_written(*frames) for frames in zip(differences.earlier.last, (differences.a, differences.b), strict=True)]
    names = [(pair.a.parameter, pair.b.parameter) for pair in differences.alignment.weights]
    both = [pair for pair in names if pair[0] in found[0] and pair[1] in found[1]]
    changed = [(first, found[0][first], found[1][second]) for first, second in both]
    alone = [one for one in changed if (one[1] > NEGLIGIBLE) != (one[2] > NEGLIGIBLE)]
    if not alone:
        return
    name, of_a, of_b = alone[0]
    run, other = ("A", "B") if of_a > of_b else ("B", "A")
    text = (
        f"{name} was written between the step before and this one in run {run} (by {max(of_a, of_b):.3g} of it), and not in "
        f"run {other}{and_so(len(alone) - 1)}"
    )
    yield Suspect(
        site=Site.of_parameter(name, "param").short,
        rank=rank,
        step=step,
        reason="source",
        text=text,
        score=max(of_a, of_b) / NEGLIGIBLE,
        change=max(of_a, of_b),
        explained=NEGLIGIBLE,
        order=(step, -1),
        side=run.lower(),
    )


def _written(before: StepFrame, now: StepFrame) -> dict[str, float]:
    """Return by how much each parameter that was updated in the step before has changed since, by its name."""
    updated = last_updates(before)
    begun = weights_begun(now)
    names = [name for name in updated if name in begun and _are_one_kind(before, updated[name], now, begun[name])]
    if not names:
        return {}
    rows = np.array([updated[name] for name in names]), np.array([begun[name] for name in names])
    return dict(zip(names, changes(before, now, *rows).tolist(), strict=True))


def _are_one_kind(before: StepFrame, i: int, now: StepFrame, j: int) -> bool:
    return before.text("dtype", i) == now.text("dtype", j) and before.count[i] == now.count[j]
