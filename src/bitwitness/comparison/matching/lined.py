"""What is compared with what: ranks, micro-batches and steps of two runs, lined up before any operator is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bitwitness.comparison.matching.batches import leaves_out
from bitwitness.comparison.matching.evaluations import FirstMicros
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.matching.idle import WithoutIdle
from bitwitness.comparison.matching.merged import MergedMicros, MergedSource, spread_differently
from bitwitness.comparison.matching.shares import shared_out_otherwise
from bitwitness.comparison.matching.shifted import shift_between
from bitwitness.comparison.measuring.changes import moved
from bitwitness.errors import UsageError
from bitwitness.store.life import life_of
from bitwitness.store.source import Source

FAILED = "failed"
"""What is said of a run that an error ended."""
_CUT_SHORT = {
    "failed": FAILED,
    "interrupted": "was interrupted",
    "killed": "was killed",
    "lost": "was lost",
    "running": "still runs",
    "stopped": "was stopped",
    "terminated": "was terminated",
}


class Place(NamedTuple):
    """One step of one rank: its number in A and in B."""

    step: int
    step_b: int
    rank: int


@dataclass(slots=True)
class Lined:
    """Two runs, lined up.

    Attributes
    ----------
    a, b
        The two, with ranks or micro-batches put together where these are spread differently.
    places
        What to compare, in order.
    merged
        Ranks were put together.
    notes
        What was done to line them up, one sentence each; ``shifted``: which step has the weights of which.
    left_out
        Which steps only one run has.
    unread
        What could not be compared.

    """

    a: Source
    b: Source
    places: list[Place] = field(default_factory=list)
    merged: bool = False
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    shifted: str = ""


def line_up(a: Source, b: Source, ranks: Sequence[int] | None, steps: Sequence[int] | None) -> Lined:
    """Find out what of two runs is the same part of the same training.

    Parameters
    ----------
    ranks, steps
        Only these, by A's numbers; None for all.

    Raises
    ------
    UsageError
        If the two have no rank or no step in common.

    """
    found = Lined(a, b)
    otherwise = not spread_differently(a, b) and shared_out_otherwise(a, b, a.ranks())
    if otherwise or spread_differently(a, b):
        found.merged = True
        _join_micros_of_ranks(found)
        found.a, found.b = MergedSource(found.a, ordered=not otherwise), MergedSource(found.b, ordered=not otherwise)
    if otherwise:
        found.notes.append("the ranks share the batch out otherwise, and read the same samples together")
    chosen = [r for r in found.a.ranks() if r in found.b.ranks() and (ranks is None or r in ranks)]
    if not chosen:
        raise UsageError(f"{a.path} has ranks {a.ranks()}, {b.path} has ranks {b.ranks()}; expected one in common")
    shift, found.shifted = shift_between(found.a, found.b, chosen[0])
    if found.shifted:
        found.notes.append(f"{found.shifted}: these two are compared, and those after them")
    for rank in chosen:
        theirs = set(found.b.steps(rank))
        common = [s for s in found.a.steps(rank) if s - shift in theirs and (steps is None or s in steps)]
        found.places += [Place(step, step - shift, rank) for step in common]
    found.places.sort()
    if not found.places:
        raise UsageError(
            f"{a.path} has steps {_shortened(a.steps(a.ranks()[0]))}, {b.path} has steps "
            f"{_shortened(b.steps(b.ranks()[0]))}; expected one in common (and among those asked for)"
        )
    if steps is None and not found.shifted:
        _note_left_out(found, chosen[0])
    _join_micros(found)
    return found


def cut_short(source: Source) -> str:
    """Say in a few words how a run ended before its time; empty for one that did not, or of which that is not known."""
    return _CUT_SHORT.get(life_of(source.info).state, "") if source.info.get("state") else ""


def _note_left_out(found: Lined, rank: int) -> None:
    """Say which steps only one run has: that one may have ended early, or recorded others."""
    here, there = found.a.steps(rank), found.b.steps(rank)
    for run, source, mine, theirs in (("A", found.a, here, there), ("B", found.b, there, here)):
        if not (alone := sorted(set(mine) - set(theirs))):
            continue
        other = found.b if source is found.a else found.a
        ended = f"; run {'AB'[run == 'A']} {how}" if (how := cut_short(other)) else ""
        found.left_out.append(
            f"step{'s' * (len(alone) > 1)} {_shortened(alone)} {'are' if len(alone) > 1 else 'is'} in run {run} only, and not "
            f"compared{ended}"
        )


def _join_micros_of_ranks(found: Lined) -> None:
    """Put each rank's micro-batches together, too, where ranks are going to be and either run has several."""
    frames = [
        StepFrame(source.table(rank, step))
        for source in (found.a, found.b)
        for rank in source.ranks()[:1]
        for step in source.steps(rank)[:1]
    ]
    if len(frames) < 2 or all(frame.micros == 1 for frame in frames) or any(map(_weights_move, frames)):
        return
    found.a, found.b = MergedMicros(found.a), MergedMicros(found.b)
    found.notes.append(
        f"run A has {frames[0].micros} and run B {frames[1].micros} micro-batches a step on each rank: put together, too"
    )


def _join_micros(found: Lined) -> None:
    """Put micro-batches together where one run has more of them than the other."""
    if found.merged:  # and each rank's micro-batches with them
        return
    place = found.places[0]
    first, second = StepFrame(found.a.table(place.rank, place.step)), StepFrame(found.b.table(place.rank, place.step_b))
    if first.micros == second.micros:
        return
    idle = WithoutIdle(found.a), WithoutIdle(found.b)
    frames = [
        StepFrame(one.table(place.rank, step)) for one, step in zip(idle, (place.step, place.step_b), strict=True)
    ]
    if frames[0].micros == frames[1].micros and frames[0].micros:
        found.a, found.b = idle
        found.notes.append("calls of the model from which no gradient comes back were left out: only one run has them")
        return
    if _weights_move(first) or _weights_move(second):
        least = min(first.micros, second.micros)
        found.a, found.b = FirstMicros(found.a, least), FirstMicros(found.b, least)
        for run, frame in (("A", first), ("B", second)):
            if frame.micros > 1 and not frame.texts["kind"].equals("optimizer").any():
                found.unread.append(
                    f"run {run} changes its weights itself between {frame.micros} batches that were recorded as one step, for "
                    f"its optimizer takes none: batches after the first {least} were not compared"
                )
        if found.unread:
            return
        found.notes.append(
            f"the optimizer evaluates the model several times a step (a closure), {first.micros} times in run A and "
            f"{second.micros} times in run B: the first {least} are compared"
        )
        return
    if leaves_out(first, second) or leaves_out(second, first):
        return  # told of the batches that one run has alone
    found.a, found.b = MergedMicros(found.a), MergedMicros(found.b)
    found.notes.append(
        f"run A has {first.micros} and run B {second.micros} micro-batches a step: they were put together, and modules and "
        "gradients compared; operators work on parts of the batch"
    )


def _weights_move(frame: StepFrame) -> bool:
    """Return whether a step's forwards read other weights than it began with: its optimizer moves them between these."""
    kinds = frame.texts["kind"]
    begun = {frame.text("name", row): row for row in np.flatnonzero(kinds.equals("parameter")).tolist()}
    readers = (kinds.equals("op") | kinds.equals("module")) & frame.texts["phase"].equals("forward")
    for row in np.flatnonzero(readers & (frame.texts["name"].codes >= 0)).tolist():
        first = begun.get(frame.text("name", row))
        if first is not None and frame.count[first] == frame.count[row] and moved(frame, first, row):
            return True
    return False


def _shortened(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return f"{shown}, … {numbers[-1]}" if len(numbers) > 5 else shown or "(none)"
