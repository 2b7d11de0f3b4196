"""What a comparison finds: an operator that made a difference; and what it carries from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.reasons.reason import SINCE


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
    lone: Node | None = None
    """The operator, where only one run has it."""
    rows: tuple[int, int] | None = None
    """What differs, where it is not the results: rows of A and B."""

    @property
    def node(self) -> Node | None:
        """The operator, as the run has it that has it alone, or as run A has it."""
        return self.lone or (self.pair.a if self.pair is not None else None)

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


def suspect_of(
    pair: Pair,
    frame: StepFrame,
    row: int,
    *,
    rank: int,
    step: int,
    reason: str,
    text: str,
    change: float,
    explained: float,
) -> Suspect:
    """Return a node that both runs have as a suspect, for one of its rows in run A's ``frame``."""
    return Suspect(
        site=f"{pair.a.site}.{frame.text('slot', row)}",
        rank=rank,
        step=step,
        reason=reason,
        text=text,
        score=change / explained if explained else math.inf,
        change=change,
        explained=explained,
        order=(step, pair.a.rows[-1]),
        stack=int(frame.stack[pair.a.rows[0]]),
        micro=pair.a.micro,
        pair=pair,
    )


def grouped(suspects: list[Suspect]) -> list[Suspect]:
    """Return suspects in their order, those of many parameters and steps that have one reason as one, the first."""
    members: dict[tuple[str, ...], list[Suspect]] = {}
    kept = []
    for one in suspects:
        key = _of_many(one)
        if key is None:
            kept.append(one)
            continue
        group = members.setdefault(key, [])
        if not group:
            kept.append(one)
        group.append(one)
    for group in members.values():
        others = len({_parameter(one) for one in group}) - 1
        steps = len({one.step for one in group})
        if others or steps > 1:
            more = [
                f"{others} other parameter{'s' * (others != 1)}" if others else "",
                f"in {steps} steps" if steps > 1 else "",
            ]
            group[0].text += f" (and so {', '.join(filter(None, more))})"
    return kept


def _parameter(one: Suspect) -> str:
    """Return whose update it is, or which weight was written: a backward reads it once more."""
    return one.text.partition(" differs: ")[0].removeprefix("its ") if one.text.endswith(SINCE) else one.site


def _of_many(one: Suspect) -> tuple[str, ...] | None:
    """Return what suspects of many parameters have in common: an update's settings, or that all were written at one time."""
    _, _, rest = one.site.partition("/")
    if ":optim." in rest:
        return rest, one.reason, one.text
    return (SINCE, str(one.rank)) if one.text.endswith(SINCE) else None


def regrouped_last(suspects: list[Suspect]) -> list[Suspect]:
    """Return suspects in their order, but what other operators hand on in other sizes behind what differs in its values.

    Where a mixture of experts takes its tokens together otherwise, its experts read other sizes, which is no mistake by itself:
    it is looked for in the same forward of the same module first.
    """
    first = suspects[0] if suspects else None
    if first is None or not is_regrouped(first):
        return suspects
    module, _, rest = first.site.partition("/")
    inside = "" if module == "." else module
    same = [one for one in suspects if (one.step, one.rank) == (first.step, first.rank) and one.site.startswith(inside)]
    found = [one for one in same if ":forward" in one.site and not is_regrouped(one)]
    if ":forward" not in rest or not found:
        return suspects
    behind = [one for one in same if is_regrouped(one)]
    return [one for one in suspects if one not in behind] + behind


def is_regrouped(one: Suspect) -> bool:
    """Return whether what other operators hand on has other sizes in each run."""
    return one.reason == "missing" and math.isinf(one.change)


@dataclass(frozen=True, slots=True)
class Exceeding:
    """A result by how far it differs, and how much of that rounding explains."""

    site: str
    rank: int
    step: int
    change: float
    explained: float

    @property
    def ratio(self) -> float:
        """How much of what is explained it differs by."""
        return self.change / self.explained if self.explained else math.inf

    def __str__(self) -> str:
        return f"{self.site} (rank {self.rank}, step {self.step}): {self.change:.3g}, of {self.explained:.2g} explained"


@dataclass(slots=True)
class EarlierSteps:
    """What is known of one rank's earlier steps.

    ``named``: the latest change of each parameter and buffer, by name; ``read``: the largest change of each gradient that an
    optimizer has read, by the parameter's name (its moments hold that, though a later gradient agrees); ``noise``: the
    largest change so far that rounding explained; ``parted``: something differed by more; ``last``: the step before, of both
    runs; ``trained``: run A's parameters that have had a gradient; ``beside``: how far those of the process's other models are
    apart by now, by name; ``has_others``: there are such models; ``cut_short``: of a run of which this step is the last one,
    how it ended before its time, in a few words, by its letter; ``skipped``: a step before was not compared; ``moves``: the
    sketches of what optimizers added to few weights, in both runs.
    """

    named: dict[str, float] = field(default_factory=dict)
    read: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    parted: bool = False
    last: tuple[StepFrame, StepFrame] | None = None
    trained: set[str] = field(default_factory=set)
    beside: Callable[[], dict[str, float]] = dict
    has_others: bool = False
    cut_short: dict[str, str] = field(default_factory=dict)
    skipped: bool = False
    moves: list[tuple[float, float]] = field(default_factory=list)

    def note_read(self, name: str, changes: list[float]) -> None:
        """Note by how much the gradients of a parameter differ that an optimizer reads."""
        self.read[name] = max([self.read.get(name, 0.0), *changes])

    def add(self, a: StepFrame, b: StepFrame) -> None:
        """Note that a step was compared."""
        self.last = a, b
        self.trained |= a.trained
