"""Who agrees with whom: how the executions of every rank's captured step (its *payload*) compare, and which are right.

A payload is executed five times: in the training itself, twice more on its own device, once on the next rank's device and,
where anything differed, once on the one after. A result is *right* when executions on two different devices agree on it.
Where no second device could be asked, the result that the two replays share is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import combinations

NAMES = ("training", "replay 1", "replay 2", "elsewhere 1", "elsewhere 2")
"""The executions of one payload, by their numbers."""
PAIRS = tuple(combinations(range(len(NAMES)), 2))
LOCAL = (0, 1, 2)
"""The executions that are made on the payload's own device."""


class Match(IntEnum):
    """How two executions of one payload compare. MISSING: one of them was not made."""

    MISSING = -1
    FAR = 0
    NEAR = 1
    EQUAL = 2


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the executions of one rank's payload compare (in the order of `PAIRS`), and what else is known of them.

    ``suspicious``: a sensor fired on this rank. ``proven_by_checksum``: an operator's own invariant failed there.
    ``outputs_changed``: the replayed forward returned other values than the training's, and its output gradient was
    computed from those. ``failed``: the payload could not be run again. ``never_repeated``: no step of this structure has been
    replayed on this rank with the training's own result so far, or not since the last one that was not. ``partial``: the
    script's loss code was not repeated in all executions. ``spread``: executions differ, as this model's healthy ones do.
    """

    matches: tuple[Match, ...]
    suspicious: bool = False
    proven_by_checksum: bool = False
    outputs_changed: bool = False
    failed: bool = False
    never_repeated: bool = False
    partial: bool = False
    spread: bool = False

    def match(self, a: int, b: int) -> Match:
        """Return how executions ``a`` and ``b`` compare."""
        return self.matches[PAIRS.index((min(a, b), max(a, b)))]

    def made(self) -> list[int]:
        """Return the executions that were made."""
        return [i for i in range(len(NAMES)) if i == 0 or self.match(0, i) is not Match.MISSING]

    def as_numbers(self) -> list[int]:
        """Return it as integers, to be sent: the matches, then the flags."""
        return [*map(int, self.matches), *(int(getattr(self, name)) for name in _FLAGS)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Agreement:
        """Return what `as_numbers` gave."""
        count = len(PAIRS)
        flags = dict(zip(_FLAGS, map(bool, numbers[count:]), strict=True))
        return cls(tuple(Match(number) for number in numbers[:count]), **flags)


# In the order of the fields, which is the same on every rank.
_FLAGS = tuple(field.name for field in fields(Agreement) if field.name != "matches")


def device_of(execution: int, rank: int, size: int) -> int:
    """Return the rank on whose device an execution of ``rank``'s payload ran."""
    return rank if execution in LOCAL else (rank + execution - 2) % size


def right_executions(row: Agreement, rank: int, size: int) -> list[int] | None:
    """Return the executions that agree on the right result, or None where nothing decides."""
    made = row.made()
    classes: list[list[int]] = []
    for execution in made:
        home = next((c for c in classes if row.match(c[0], execution) is Match.EQUAL), None)
        if home is None:
            classes.append([execution])
        else:
            home.append(execution)
    alone = size == 1 or all(execution in LOCAL for execution in made)

    def weight(members: list[int]) -> tuple[int, int]:
        return len({device_of(e, rank, size) for e in members}), len(members)

    # First what most devices gave, then what came out most often.
    classes.sort(key=weight, reverse=True)
    best = weight(classes[0])
    if best[1] < 2 or (not alone and best[0] < 2):
        return None  # nobody, or no second device, agrees with it
    if len(classes) > 1 and weight(classes[1])[0] == best[0] and (not alone or weight(classes[1]) == best):
        return None  # as many devices (or, on one device, as many executions) gave another result
    return classes[0]


def spreading(rows: Sequence[Agreement]) -> list[int]:
    """Return the ranks whose own executions differ among themselves by more than rounding."""
    own = [pair for pair in PAIRS if set(pair) <= set(LOCAL)]
    return [rank for rank, row in enumerate(rows) if any(row.match(*pair) is Match.FAR for pair in own)]
