"""By how many steps one run is ahead of another: one that was resumed counts from zero again, and is known by its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np

from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.store.source import Source

Fingerprint = tuple[tuple[str, float, float], ...]
"""Names, norms and means."""

_MOST = 4096
"""Steps of A that are searched for the weights that B begins with."""
_STILL = 32
"""Steps that are searched where the weights do not move."""
_RESUMED, _AS_WELL = 0.4, 3.0
"""Share of the weights from which on a step is the one that a run resumed from, and times what else agrees."""


def begins_with(source: Source) -> Fingerprint:
    """Return what the parameters are known by that a recording's first step begins with; nothing where none were recorded."""
    for rank in source.ranks()[:1]:
        for step in source.steps(rank)[:1]:
            return _weights(source, rank, step)
    return ()


def shift_between(a: Source, b: Source, rank: int) -> tuple[int, str]:
    """Return by how many steps A is ahead of B, and how that is known; 0 and nothing where they begin together."""
    steps_a, steps_b = sorted(a.steps(rank)), sorted(b.steps(rank))
    if not steps_a or not steps_b:
        return 0, ""
    common = sorted(set(steps_a) & set(steps_b))
    known = cache(partial(_known, (a, b), rank))
    here = _agreeing(*(known(side, common[0])[0] for side in (0, 1))) if common else 0.0
    if here == 1.0:
        share, shift = 1.0, _unmoved(common, known)
    else:
        # A resume that has forgotten some of its weights is one, too, where nothing else agrees as well (what is frozen does).
        share, shift = max(_shifts(a, b, rank, steps_a, steps_b), key=lambda one: one[0], default=(0.0, 0))
    if shift == 0 or share < min(1.0, max(_RESUMED, _AS_WELL * here)):
        return 0, ""
    later, earlier, ahead = ("B", "A", shift) if shift > 0 else ("A", "B", -shift)
    first = steps_b[0] if shift > 0 else steps_a[0]
    some = "" if share == 1.0 else f" ({share:.0%} of them)"
    return shift, f"step {first} of run {later} starts from the weights{some} of step {first + ahead} of run {earlier}"


def _known(sources: tuple[Source, Source], rank: int, side: int, step: int) -> tuple[Fingerprint, Fingerprint]:
    """Return what a step's weights are known by, as it finds them, and what the model is given in it."""
    frame = StepFrame(sources[side].table(rank, step))
    return _weights_of(frame), _given(frame)


def _unmoved(common: list[int], known: Callable[[int, int], tuple[Fingerprint, Fingerprint]]) -> int:
    """Return by how many steps A is ahead where weights do not tell: a warm-up's first step, say, moves none.

    Then the batches tell, of the few steps before the weights move: those that both were given the same in.
    """
    first = common[0]
    weights, given = zip(known(0, first), known(1, first), strict=True)
    if given[0] == given[1]:
        return 0
    found, moved = 0, False
    for step in common[1:_STILL]:
        now = known(0, step), known(1, step)
        still = [now[side][0] == weights[side] for side in (0, 1)]
        moved |= not all(still)
        for side, ahead in ((0, step - first), (1, first - step)):
            if not found and still[side] and now[side][1] == given[1 - side]:
                found = ahead
        if not any(still):
            break
    return found if moved else 0  # where nothing ever moves batches may come in any order


def _shifts(a: Source, b: Source, rank: int, steps_a: list[int], steps_b: list[int]) -> Iterator[tuple[float, int]]:
    """Yield the share of weights that agree, and by how many steps A is ahead then, up to the first that all agree."""
    begun_a, begun_b = _weights(a, rank, steps_a[0]), _weights(b, rank, steps_b[0])
    for step in (one for one in steps_a[:_MOST] if one != steps_b[0]):
        yield (share := _agreeing(_weights(a, rank, step), begun_b)), step - steps_b[0]
        if share == 1.0:
            return
    for step in (one for one in steps_b[:_MOST] if one != steps_a[0]):
        yield _agreeing(begun_a, _weights(b, rank, step)), steps_a[0] - step


def _weights(source: Source, rank: int, step: int) -> Fingerprint:
    """Return what a step's parameters are known by, as the step finds them."""
    return _weights_of(StepFrame(source.table(rank, step)))


def _weights_of(frame: StepFrame) -> Fingerprint:
    return _known_by(frame, np.flatnonzero(frame.texts["kind"].equals("parameter")).tolist())


def _given(frame: StepFrame) -> Fingerprint:
    """Return what the model's inputs of a step are known by."""
    named = np.flatnonzero(frame.texts["name"].codes >= 0).tolist()
    return _known_by(frame, [row for row in named if frame.text("name", row).startswith("input ")])


def _known_by(frame: StepFrame, rows: list[int]) -> Fingerprint:
    numbers = frame.numbers
    return tuple(
        sorted({(frame.text("name", row), float(numbers["l2"][row]), float(numbers["mean"][row])) for row in rows})
    )


def _agreeing(a: Fingerprint, b: Fingerprint) -> float:
    """Return the share of the weights that two steps start from that are the same, to the last bit of their norms and means."""
    if [one[0] for one in a] != [one[0] for one in b]:
        return 0.0
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a) if a else 0.0
