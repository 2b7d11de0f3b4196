"""A gradient that only one run reduces over its ranks: seen by what the ranks' optimizers read, not by any operator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, partial

from bitwitness.comparison.chains import left_in_gradients
from bitwitness.comparison.frame import StepFrame
from bitwitness.comparison.lined import Place
from bitwitness.comparison.suspect import Suspect
from bitwitness.store.source import Source

_SAME = 1e-6
"""Relative difference of two ranks' sketches up to which they read the same gradient."""


def name_not_exchanged(suspects: Iterable[Suspect], a: Source, b: Source, places: Sequence[Place]) -> None:
    """Say of edited gradients that ranks read one in one run and each its own in the other, where that is what they are about.

    Of each step all ranks are read, once.
    """
    step_in_b = {(place.rank, place.step): place.step_b for place in places}
    shared_in_a, shared_in_b = (cache(partial(_shared, source)) for source in (a, b))
    for suspect in suspects:
        if suspect.reason != "edited" or suspect.pair is None:
            continue
        node = suspect.pair.a
        name = node.module if node.kind == "optimizer" else node.parameter
        first = shared_in_a(suspect.step).get(name)
        second = shared_in_b(step_in_b[suspect.rank, suspect.step]).get(name)
        if first is not None and second is not None and first != second:
            one, other = ("A", "B") if first else ("B", "A")
            suspect.text = (
                f"the gradient of {name} is the same on all ranks in run {one}, and each rank's own in run {other}: it is "
                "not reduced over the ranks there (a missing all-reduce)"
            )


def _shared(source: Source, step: int) -> dict[str, bool]:
    """Return of each gradient that the optimizers of all of several ranks have read whether that was the same one."""
    ranks = source.ranks()
    if len(ranks) < 2:
        return {}
    first, *others = (_known(left_in_gradients(StepFrame(source.table(rank, step)))) for rank in ranks)
    return {
        name: all(abs(one[name] - mine) <= _SAME * max(abs(one[name]), abs(mine)) for one in others)
        for name, mine in first.items()
        if all(name in one for one in others)
    }


def _known(sketches: dict[str, float]) -> dict[str, float]:
    return {name: sketch for name, sketch in sketches.items() if not math.isnan(sketch)}
