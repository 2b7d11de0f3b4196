"""By what numbers the gradients of a step are multiplied: run B's against run A's, and on their way within each run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import median

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.chains import Chain, chains_of, is_rounded_off, link_of, row_at
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.allowance import rms
from bitwitness.comparison.measuring.relation import factor, tolerance

_MOST = 0.9
"""Share of the parameters that one factor has to hold for: a few have gradients that are rounding errors."""
_USUAL = 0.5
"""The same of what a run does to all of them beside edits of some."""
SMALL = 1e-3
"""Times the usual size of a gradient, below which one may be rounding errors alone."""
COARSE = 16.0
"""Unit roundoffs of the coarser precision up to which a factor counts as exact, where runs compute in different ones."""

Ends = tuple[int | None, int | None]
"""The rows of one gradient at two stages."""


class GradientFactors:
    """Follows the gradients of one step of one rank.

    Parameters
    ----------
    differences
        The step.

    """

    def __init__(self, differences: Differences) -> None:
        self._differences = differences
        self._a, self._b = differences.a, differences.b
        self.chains = chains_of(differences)
        usual = differences.usual_gradient
        self._weighty = [c for c in self.chains if c.a[1] is not None and rms(self._a, c.a[1]) >= SMALL * usual]

    def edited(self, chain: Chain) -> tuple[float | None, float | None] | None:
        """Return by what a gradient was multiplied between backward and optimizer in each run, where that differs."""
        first, second = (link_of(frame, rows) for frame, rows in ((self._a, chain.a), (self._b, chain.b)))
        if first is None and second is None:
            return None
        if any(is_rounded_off(*one) for one in ((self._a, chain.a, first), (self._b, chain.b, second))):
            return None
        if first is not None and second is not None:
            # Beside what happens to all gradients of a run, as a clipping does.
            x, y = first / self._usual[0], second / self._usual[1]
            if abs(x - y) <= self._limit(within=True) * max(abs(x), abs(y)):
                return None
        return first, second

    def edited_elsewhere(self, chain: Chain) -> bool:
        """Return whether a gradient agrees as the backward leaves it and as the optimizer reads it, and not in between."""
        if self._is_reduced or (chain.a[0] == chain.a[1]) == (chain.b[0] == chain.b[1]):
            return False
        return self.left_alike(chain) and self._alike(row_at(chain.a, 2), row_at(chain.b, 2))

    def left_alike(self, chain: Chain) -> bool:
        """Return whether a gradient agrees as the backward leaves it."""
        return self._alike(chain.a[0], chain.b[0])

    def _alike(self, i: int | None, j: int | None) -> bool:
        return i is not None and j is not None and self._is_one(factor(self._a, i, self._b, j, self._noise) or 0.0)

    def _ends(self) -> tuple[tuple[StepFrame, list[Ends]], ...]:
        """Return, for both runs, each gradient as the backward left it and as the optimizer read it."""
        sides = (self._a, [c.a for c in self._weighty]), (self._b, [c.b for c in self._weighty])
        return tuple((frame, [(rows[0], row_at(rows, 2)) for rows in of]) for frame, of in sides)

    @cached_property
    def multiplied(self) -> tuple[float | None, float | None]:
        """By what all gradients of A and of B are multiplied between backward and step; None where by no one number."""
        first, second = (self._common(ends, frame) for frame, ends in self._ends())
        return first, second

    @cached_property
    def _usual(self) -> tuple[float, float]:
        """The same, or of most beside edits of some where none is left as it is; 1 where by no one number."""
        first, second = map(self._usually, self.multiplied, self._ends())
        return first, second

    def _usually(self, every: float | None, of: tuple[StepFrame, Sequence[Ends]]) -> float:
        frame, ends = of
        untouched = any(i is not None and j is not None and frame.value[i] == frame.value[j] for i, j in ends)
        most = self._common(ends, frame, most=_USUAL) if every is None and not untouched else every
        return most or 1.0

    @property
    def _edits_some(self) -> bool:
        """Whether a run multiplies most gradients by one number, and does something else to some than to clip them together."""
        for every, usual, (frame, ends) in zip(self.multiplied, self._usual, self._ends(), strict=True):
            found = [None if i is None or j is None else factor(frame, i, frame, j) for i, j in ends]
            others = [one for one in found if one is None or abs(one - usual) > self._limit() * abs(usual)]
            times = [one for one in others if one]
            clipped = len(times) == len(others) > 1 and max(times) - min(times) <= self._limit() * max(times)
            if every is None and usual != 1.0 and not clipped:
                return True
        return False

    def _common(
        self,
        rows: Sequence[tuple[int | None, int | None]],
        within: StepFrame | None = None,
        least: float = 0.0,
        most: float = _MOST,
    ) -> float | None:
        """Return the one factor between pairs of rows, of A and B or both of one run, if there is one; ``least``: noise."""
        a, b = within or self._a, within or self._b
        least = 0.0 if within else max(self._noise, least)
        found = [None if i is None or j is None else factor(a, i, b, j, least) for i, j in rows]
        known = [one for one in found if one is not None]
        if not known or len(known) < most * len(found):
            return None
        middle = median(known)
        agreeing = sum(abs(one - middle) <= max(self._limit(), least) * abs(middle) for one in known)
        return middle if agreeing >= most * len(found) else None

    def _limit(self, *, within: bool = False) -> float:  # within each run no other precision rounds
        i, j = (self._weighty or self.chains)[0].a[1], (self._weighty or self.chains)[0].b[1]
        assert i is not None and j is not None  # noqa: S101, PT018 - of a weighty one
        return 2 * max(tolerance(self._a, i, self._b, j), 0.0 if within else self._noise)

    @property
    def _noise(self) -> float:
        """How far gradients may be from an exact factor where the runs compute in different precisions."""
        return COARSE * self._differences.roundoff_inside

    def _is_one(self, ratio: float, least: float = 0.0) -> bool:
        return abs(ratio - 1.0) <= max(self._limit(), least)

    @property
    def _is_reduced(self) -> bool:
        """Whether gradients pass between ranks: both runs then have those from before."""
        return all(chain.a[0] != chain.a[1] and chain.b[0] != chain.b[1] for chain in self._weighty)
