"""What optimizers made of the weights, in two precisions: by how much, and where to, a step moved them.

Rounding changes single updates, of an Adam even their signs, and of all together next to nothing. So the updates of a step, as
one vector, agree wherever the trainings do; they show another optimizer, or lost updates, where rounding hides the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.absent import last_updates, weights_begun
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.allowance import roundoff
from bitwitness.comparison.measuring.changes import same_order
from bitwitness.comparison.measuring.relation import in_times
from bitwitness.comparison.precisions.whole import other_input
from bitwitness.comparison.suspect import Suspect, suspect_of

_APART = (0.45, 0.75)
"""How far apart all updates together may be, of their size, in the first step and later. Seen in healthy pairs in bfloat16 and
float16, of eighty architectures: 0.22, and 0.48 of a GAN."""
_FEWEST = 6
"""Parameters, at least, whose sketches tell that: each is one random sum of an update."""
_LOST = 0.5
"""Times as much as in a finer dtype that weights move at the most where their updates are called lost."""


class _Update(NamedTuple):
    """A weight's update in a step: the sketches of what either run's optimizer added, and the pair of nodes that did."""

    pair: Pair
    of_a: float
    of_b: float

    @property
    def apart(self) -> float:
        return abs(self.of_a - self.of_b)


_Words = Callable[[Differences, _Update, float, float, float], str]
"""Says how the weight that differs most moved otherwise: given the size of all moves of A and of B, and how far apart."""


def moved_otherwise(differences: Differences, rank: int, step: int) -> list[Suspect]:
    """Return the update that differs most, if those of all weights together differ by more than two precisions explain.

    Where the model was given another input, return that.
    """
    if differences.precisions is None or differences.parted_before:
        return []
    updates = _updates(differences)
    known = [(one.of_a, one.of_b) for one in updates]
    if 0 < len(updates) < _FEWEST:  # of few weights those of all steps are taken together
        differences.earlier.moves += known
        known = differences.earlier.moves
    told = _far_apart(differences, updates, known, _rounded(differences, updates), _in_words)
    if told is None:
        followers = _followers(differences)
        known = [(one.of_a, one.of_b) for one in followers]
        told = _far_apart(differences, followers, known, 0.0, _in_words_of_followers)
    if told is None:
        return []
    pair, text, apart, limit = told
    return other_input(differences, rank, step) or [
        suspect_of(
            pair, differences.a, pair.outputs[0][0], rank=rank, step=step, reason="computed", text=text, change=apart,
            explained=limit,
        )
    ]  # fmt: skip


def _far_apart(
    differences: Differences, moved: list[_Update], known: list[tuple[float, float]], rounded: float, in_words: _Words
) -> tuple[Pair, str, float, float] | None:
    """Return the weight that differs most, if all moves together do by more than is explained: it, why, by how much, the limit.

    Parameters
    ----------
    known
        The sketches of what is judged, run A's and run B's of each move.
    rounded
        What rounding weights may have made of all of them.

    """
    of_a, of_b = (math.hypot(*side) for side in zip(*known, strict=True)) if known else (0.0, 0.0)
    if len(known) < _FEWEST or not max(of_a, of_b):
        return None
    apart = math.hypot(*(x - y for x, y in known)) / max(of_a, of_b)
    explained = limit = _APART[differences.earlier.last is not None]
    if rounded and of_b >= _LOST * of_a:
        # Rounding a weight takes no more from its update than there is: the nearer of two neighbours is taken.
        first, second = map(roundoff, differences.dtypes(*moved[0].pair.outputs[0]))
        explained = math.hypot(limit, min(rounded, of_a if first < second else of_b) / max(of_a, of_b))
    if apart <= explained:
        return None
    worst = max(moved, key=lambda one: one.apart)
    return worst.pair, in_words(differences, worst, of_a, of_b, apart), apart, limit


def _rounded(differences: Differences, moved: list[_Update]) -> float:
    """Return what rounding to the dtype that weights are kept in makes of all updates, where that is not one dtype."""
    sizes = []
    for one in moved:
        i, j = one.pair.outputs[0]
        for frame, row, other in (
            (differences.a, i, differences.b.text("dtype", j)),
            (differences.b, j, differences.a.text("dtype", i)),
        ):
            coarse = roundoff(frame.text("dtype", row))
            sizes.append(coarse * float(frame.numbers["l2"][row]) if coarse > roundoff(other) else 0.0)
    return math.hypot(*sizes)


def _in_words(differences: Differences, worst: _Update, of_a: float, of_b: float, apart: float) -> str:
    wide, dtype = differences.dtypes(*worst.pair.outputs[0])
    if roundoff(dtype) > roundoff(wide) and of_b < _LOST * of_a:
        return (
            f"its update is lost in {dtype}: all weights together move {in_times(of_b / of_a)} as much in run B, for most "
            f"of what is added is less than the last digit of a weight in {dtype} (keep weights in {wide} for the optimizer)"
        )
    size = f"{in_times(of_b / of_a)} as large in run B" if of_a else "none in run A"
    return (
        "its update differs by more than the precision of its gradient explains: those of all weights together by "
        f"{apart:.2g} of their size ({size})"
    )


def _in_words_of_followers(differences: Differences, worst: _Update, of_a: float, of_b: float, apart: float) -> str:
    dtypes = differences.dtypes(*worst.pair.outputs[0])
    in_dtypes = (
        f"they are {dtypes[0]} in run A and {dtypes[1]} in run B" if dtypes[0] != dtypes[1] else f"{dtypes[0]} in both"
    )
    size = f"they move {in_times(of_b / of_a)} as much in run B" if of_a else "they do not move in run A"
    return (
        "the weights that no optimizer updates (of a teacher, an average) were moved otherwise since "
        f"the step before: all of them together differ by {apart:.2g} of what they move ({size}; {in_dtypes})"
    )


def _followers(differences: Differences) -> list[_Update]:
    """Return how far the weights moved since the step before that no optimizer updates."""
    if differences.earlier.last is None:
        return []
    frames = list(zip(differences.earlier.last, (differences.a, differences.b), strict=True))
    begun = [(weights_begun(before), weights_begun(now)) for before, now in frames]
    updated = [last_updates(before).keys() for before, _ in frames]
    found = []
    for pair in differences.alignment.weights:
        names = pair.a.parameter, pair.b.parameter
        sides = list(zip(names, frames, begun, updated, strict=True))
        known = all(name in rows[0] and name in rows[1] for name, _, rows, _ in sides)
        if not known or any(name in theirs for name, _, _, theirs in sides):
            continue
        moved = [
            float(now.numbers["sketch"][rows[1][name]] - before.numbers["sketch"][rows[0][name]])
            for name, (before, now), rows, _ in sides
        ]
        found.append(_Update(pair, *moved))
    return _comparable(differences, found)


def _updates(differences: Differences) -> list[_Update]:
    moved = [_sketches(frame) for frame in (differences.a, differences.b)]
    both = [
        _Update(pair, moved[0][pair.a.module], moved[1][pair.b.module])
        for pair in differences.alignment.pairs
        if pair.a.kind == "optimizer" and pair.outputs and pair.a.module in moved[0] and pair.b.module in moved[1]
    ]
    return _comparable(differences, both)


def _comparable(differences: Differences, found: list[_Update]) -> list[_Update]:
    """Return those that lie in memory in the same order in both runs, else their sketches say nothing of each other."""
    rows = np.array([one.pair.outputs[0] for one in found], dtype=np.int64).reshape(-1, 2)
    comparable = same_order(differences.a, differences.b, rows[:, 0], rows[:, 1]).tolist()
    return [one for one, is_one in zip(found, comparable, strict=True) if is_one and math.isfinite(one.apart)]


def _sketches(frame: StepFrame) -> dict[str, float]:
    """Return the sketch of what a step added to each weight, by its name."""
    after = last_updates(frame)
    begun = weights_begun(frame)
    names = [name for name in after if name in begun]
    sketches = frame.numbers["sketch"]
    rows = np.array([[after[name], begun[name]] for name in names], dtype=np.int64).reshape(-1, 2)
    return dict(zip(names, (sketches[rows[:, 0]] - sketches[rows[:, 1]]).tolist(), strict=True))
