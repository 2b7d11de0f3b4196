"""Who is looked at on a deep step where not all can be: one in so many, each in its turn; the small ones always.

Reading a large tensor takes as long as its operator does; a small one costs what a call costs, whatever is asked of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

_SMALL = 1 << 20
"""Bytes up to which a call is always looked at: a fraction of a millisecond."""


def is_small(tensors: Iterable[Tensor]) -> bool:
    """Tell whether a call's tensors are small in all: its results, or all that would be read."""
    # a sparse tensor has no ``nbytes``
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _SMALL


@dataclass(slots=True)
class Turns:
    """Counts the calls of a step that take turns."""

    _place: int = 0
    _turn: int = 0

    def has_one(self, one_in: int) -> bool:
        """Tell whether the next call is looked at, one in so many."""
        if one_in == 1:
            return True
        self._place += 1
        return self._place % one_in == self._turn % one_in

    def next_step(self) -> None:
        """Let others have their turn."""
        self._place, self._turn = 0, self._turn + 1
