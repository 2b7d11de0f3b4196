"""Kinds of step: what a script computes from its forwards may change as it trains, and each change is to be replayed once."""

from __future__ import annotations

from collections import Counter

_SEEN = 3
"""Steps of one kind until it is taken for one that stays: the loss with a penalty that was switched on, say."""
_MOST = 8
"""Kinds that are replayed for this: a script may compute something else at every step."""
_KEPT = 1024
"""Kinds that are counted at a time: what comes again comes soon."""


class NewKinds:
    """Tells when a kind of step that nobody suspects is to be replayed, so that a later one that somebody does can be.

    Of a step whose kind was never seen to give the training's own result again, a replay proves nothing.
    """

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()
        self._asked = 0

    def is_due(self, shape: int, *, known: bool) -> bool:
        """Count a step of this `StepRecord.shape`; ``known``: a replay of its kind has given the training's own result."""
        if shape not in self._seen and len(self._seen) >= _KEPT:
            del self._seen[next(iter(self._seen))]
        self._seen[shape] += 1
        due = not known and self._seen[shape] == _SEEN and self._asked < _MOST
        self._asked += due
        return due
