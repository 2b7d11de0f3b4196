"""Who is looked at on a deep step where not all can be: one in so many, each in its turn; the small ones always.

Reading a large tensor takes as long as its operator does; a small one costs what a call costs, whatever is asked of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

_SMALL = 1 << 20
"""Bytes up to which a call is always looked at: a fraction of a millisecond."""
MANY = 128
"""Calls of one operator in a step that are looked at whatever it costs."""


def is_small(tensors: Iterable[Tensor]) -> bool:
    """Tell whether a call's tensors are small in all: its results, or all that would be read."""
    # a sparse tensor has no ``nbytes``
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _SMALL


@dataclass(slots=True)
class Turns:
    """Counts the calls of a step that take turns."""

    beyond: int = 8
    """One in so many has its turn of an operator's calls beyond the first `MANY` of a step."""
    _calls: Counter[str] = field(default_factory=Counter)
    _place: int = 0
    _turn: int = 0

    def has_one(self, one_in: int) -> bool:
        """Tell whether the next call is looked at, one in so many."""
        if one_in == 1:
            return True
        self._place += 1
        return self._place % one_in == self._turn % one_in

    def is_among_many(self, op: str) -> bool:
        """Count a call of an operator; tell whether it is beyond the first of a step, and not its turn.

        A layer that is unrolled in time calls its operators thousands of times on small tensors, each of which costs what a
        call costs.
        """
        self._calls[op] += 1
        beyond = self._calls[op] - MANY
        return beyond > 0 and beyond % self.beyond != self._turn % self.beyond

    def next_step(self) -> None:
        """Let others have their turn."""
        self._calls.clear()
        self._place, self._turn = 0, self._turn + 1
