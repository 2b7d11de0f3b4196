"""A gradient that only one run reduces over its ranks: seen by what the ranks' optimizers read, not by any operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial

from bitwitness.comparison.gradients.chains import gradients_in
from bitwitness.comparison.gradients.ownranks import CHANGES_ITS_OWN, NOT_REDUCED
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.matching.lined import Place
from bitwitness.comparison.measuring.relation import and_so
from bitwitness.comparison.suspect import Suspect
from bitwitness.store.source import Source

_SAME = 1e-6
"""Relative difference of two ranks' sketches up to which they read the same gradient."""
_NEARLY = 1e-3
"""The same of two runs' sketches."""


def name_not_exchanged(suspects: Iterable[Suspect], a: Source, b: Source, places: Sequence[Place]) -> None:
    """Say of gradients that ranks have one in one run and each its own in the other, where that is what they are about.

    Of each step all ranks are read, once.
    """
    step_in_b = {(place.rank, place.step): place.step_b for place in places}
    read = {side: cache(partial(_sketches, source)) for side, source in (("A", a), ("B", b))}
    shared = {side: cache(partial(_shared, one)) for side, one in read.items()}
    for suspect in suspects:
        if suspect.pair is None or suspect.pair.a.kind not in ("gradient", "optimizer"):
            continue
        node = suspect.pair.a
        name = node.module if node.kind == "optimizer" else node.parameter
        steps = {"A": suspect.step, "B": step_in_b[suspect.rank, suspect.step]}
        if suspect.reason == "edited" and (sides := _one_has_its_own(shared, steps, name, "optimizer")):
            one, other = sides
            suspect.text = (
                f"the gradient of {name} is the same on all ranks in run {one}, and each rank's own in run {other}: "
                f"{NOT_REDUCED}"
            ) + and_so(_alike(shared, steps, sides, "optimizer") - 1)
        elif node.kind == "gradient" and (sides := _one_has_its_own(shared, steps, name, "gradient")):
            suspect.reason = "edited"
            others = and_so(_alike(shared, steps, sides, "gradient") - 1)
            if odd := _odd_ranks([read[side](steps[side], "gradient") for side in sides], name):
                ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(str(a.ranks()[one]) for one in odd)}"
                suspect.text = (
                    f"the reduced gradient of {name} is another one on {ranks} of run {sides[1]}, and elsewhere the same as on "
                    f"all ranks of run {sides[0]}: it arrives wrongly there, or is edited there alone{others}"
                )
                continue
            suspect.text = (
                f"each rank changes its own gradient of {name} {CHANGES_ITS_OWN} in run {sides[1]}, and not before that in "
                f"run {sides[0]}"
            ) + others


Sketches = Sequence[Mapping[str, float]]
Shared = Callable[[int, str], dict[str, bool]]


def _one_has_its_own(
    shared: Mapping[str, Shared], steps: Mapping[str, int], name: str, kind: str
) -> tuple[str, str] | None:
    """Return the run whose ranks have one gradient in rows of a kind, and the one where each has its own; None for others."""
    alike = {side: shared[side](steps[side], kind).get(name) for side in "AB"}
    if None in alike.values() or alike["A"] == alike["B"]:
        return None
    return ("A", "B") if alike["A"] else ("B", "A")


def _alike(shared: Mapping[str, Shared], steps: Mapping[str, int], sides: tuple[str, str], kind: str) -> int:
    """Return how many gradients ranks have one of in the first of two runs, and each its own in the second."""
    one, other = (shared[side](steps[side], kind) for side in sides)
    return sum(same and other.get(name) is False for name, same in one.items())


def _odd_ranks(sides: Sequence[Sketches], name: str) -> list[int]:
    """Return the ranks, by their place, whose gradient in the second run is not that of all in the first; none if all are."""
    first, second = ([rank.get(name, math.nan) for rank in side] for side in sides)
    odd = [place for place, one in enumerate(second) if not abs(one - first[0]) <= _NEARLY * abs(first[0])]
    return odd if len(odd) < len(second) == len(first) else []


def _shared(read: Callable[[int, str], Sketches], step: int, kind: str) -> dict[str, bool]:
    """Return of each gradient that all of several ranks have, in rows of a kind, whether it is the same one."""
    ranks = read(step, kind)
    if len(ranks) < 2:
        return {}
    first, *others = ranks
    return {
        name: all(abs(one[name] - mine) <= _SAME * max(abs(one[name]), abs(mine)) for one in others)
        for name, mine in first.items()
        if all(name in one for one in others)
    }


def _sketches(source: Source, step: int, kind: str) -> Sketches:
    """Return each rank's sketches of gradients by parameter, in rows of a kind; none of what is not known."""
    return [_known(gradients_in(StepFrame(source.table(rank, step)), kind)) for rank in source.ranks()]


def _known(sketches: dict[str, float]) -> dict[str, float]:
    return {name: sketch for name, sketch in sketches.items() if not math.isnan(sketch)}
