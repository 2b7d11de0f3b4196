"""What was learned of each set of parameters that a script trains: it may freeze and unfreeze parts by turns, as a GAN's."""

from __future__ import annotations

from typing import Generic, TypeVar

_MOST = 16
"""Sets that are remembered: a script may train others at every step."""

Names = tuple[str, ...]
Learned = TypeVar("Learned")


class ByParameters(Generic[Learned]):
    """Keeps what belongs to the sets of parameters that are not trained now."""

    def __init__(self) -> None:
        self._kept: dict[Names, Learned] = {}

    def exchange(self, before: Names, learned: Learned, now: Names) -> Learned | None:
        """Put away what was learned of the parameters before, and return what is known of those of now, if anything is."""
        self._kept[before] = learned
        if len(self._kept) > _MOST:
            del self._kept[next(iter(self._kept))]
        return self._kept.pop(now, None)
