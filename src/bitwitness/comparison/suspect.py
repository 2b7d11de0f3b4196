"""What a comparison finds: an operator that made a difference; and what it carries from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bitwitness.comparison.align import Pair


@dataclass(slots=True)
class Suspect:
    """An operator that made a difference.

    ``score``: how many times more its results differ than rounding explains; ``change``: by how much, relatively.
    ``side``: ``a`` or ``b`` where only that run has the operator, else empty. ``clean``: all its inputs agree.
    """

    site: str
    rank: int
    step: int
    reason: str
    text: str
    score: float
    change: float
    explained: float
    order: tuple[int, int]
    side: str = ""
    clean: bool = True
    stack: int = -1
    micro: int = 0
    line: str = ""
    pair: Pair | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "site": self.site,
            "rank": self.rank,
            "step": self.step,
            "micro": self.micro,
            "reason": self.reason,
            "text": self.text,
            "score": self.score,
            "change": self.change,
            "explained": self.explained,
            "only_in": self.side or None,
            "line": self.line or None,
            "inputs_agree": self.clean,
        }


@dataclass(slots=True)
class EarlierSteps:
    """What is known of one rank's earlier steps.

    ``named``: the latest change of each parameter and buffer, by name; ``noise``: the largest change so far that rounding
    explained; ``parted``: something differed by more.
    """

    named: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    parted: bool = False
