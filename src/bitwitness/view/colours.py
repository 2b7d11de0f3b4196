"""What a node of the graph is found to be, from pass to wrong: each state with a colour, a symbol and words.

A colour never stands alone: whoever does not see it, or prints the page, reads the symbol.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class State(IntEnum):
    """A node's state; the larger, the worse, so that a group shows the largest of what it holds."""

    SEEN = 0
    """Recorded, and nothing stands against it."""
    EQUAL = 1
    ROUNDING = 2
    UNMATCHED = 3
    """Only one of two runs has it."""
    PASSED_ON = 4
    """Its results are wrong, and so is what it read."""
    MADE_HERE = 5
    """It made the difference, or the first NaN or Inf: a suspect."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a state is shown."""

    name: str
    symbol: str
    letter: str
    """The symbol where only ASCII can be drawn: on Model Explorer's canvas."""
    words: str
    background: str
    text: str

    @property
    def label(self) -> str:
        """The symbol and the words, in ASCII."""
        return f"{self.letter} {self.words}"


LOOKS = {
    State.SEEN: Look("seen", "·", ".", "recorded", "#f1f3f4", "#202124"),
    State.EQUAL: Look("equal", "=", "=", "equal", "#cfead6", "#0b3d1a"),
    State.ROUNDING: Look("rounding", "≈", "~", "rounding", "#e6f0c0", "#33400a"),
    State.UNMATCHED: Look("unmatched", "?", "?", "only in one run", "#d9d2f0", "#2c1b5a"),
    State.PASSED_ON: Look("passed", "↓", ">", "passed on", "#ffd8a8", "#5b2c00"),
    State.MADE_HERE: Look("made", "✗", "X", "made here", "#c5221f", "#ffffff"),
}


def worst(states: Iterable[State]) -> State:
    """Return what a group shows of the nodes in it."""
    return max(states, default=State.SEEN)
