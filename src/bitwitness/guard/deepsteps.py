"""Which steps are deep: at a fixed distance, or as many as the price allows; the same steps on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from bitwitness.config import Config
from bitwitness.guard.budget import RAREST, Budget, Plan
from bitwitness.ranks import Ranks

_AFTER_SUSPICION = 3  # steps: what was suspected may come back at once, and the operator is to be caught then
_FIRST = (2, 5, 8)  # by which the price of one is learned; calibrations are elsewhere
_UNTIL_KNOWN = 16  # steps between two, as long as no price is known: dear enough to learn it, and no dearer
_REVISED = 16  # steps between two looks at the plan


class DeepSteps:
    """Decides, and measures what it is decided by.

    Parameters
    ----------
    config
        ``deep_every`` fixes the distance; None leaves it to ``budget``.
    from_start
        Take the first step, too: nothing has to be learned before.

    """

    def __init__(self, config: Config, *, from_start: bool = False) -> None:
        looks = config.checksum, config.nonfinite, config.twice, config.collective, config.recompute
        self.enabled = any(sensor.enabled for sensor in looks)
        self._from_start = from_start
        self._fixed = config.deep_every
        self.budget = Budget(config.budget)
        self.plan = Plan(0)
        self.taken = 0
        self.useful = True
        """Whether deep steps have anything to look at here."""
        self._last = 0
        self._until = -1
        self._proposal = Plan(0)
        self._ended: float | None = None

    def is_deep(self, step: int) -> bool:
        """Tell whether a step's operators are looked at; steps are counted as they are looked at (`StepRecord.number`)."""
        if not self.enabled:
            return False
        if step <= self._until:
            return True
        if self._from_start and step == 0:
            return True
        if self._fixed is not None:
            return self._fixed > 0 and step % self._fixed == min(1, self._fixed - 1)
        if step in _FIRST:
            return True
        if not self.plan.every:
            return step > _FIRST[-1] and step % _UNTIL_KNOWN == 0
        return step >= self._last + self.plan.every

    def look_closely_after(self, step: int) -> None:
        """Make the steps after a suspicion deep, too."""
        self._until = step + _AFTER_SUSPICION

    def begin_again(self, step: int) -> None:
        """Let the next deep step follow from this one and the plan alone, as on all ranks that say the same."""
        self._last = step
        self._until = -1
        self._ended = None

    def agree(self, ranks: Ranks, step: int, *here: bool) -> list[bool]:
        """Tell, of each of some statements, whether it holds on any rank; settle the plan. The one exchange of a light step.

        Of the ranks' plans the maximum counts: the dearest rank decides.
        """
        if self._fixed is None and step % _REVISED == 0:
            self._proposal = self.budget.propose() if self.useful or not self.budget.ready else Plan(RAREST)
        flags = [float(flag) for flag in here]
        told = ranks.max(torch.tensor([*flags, float(self._proposal.every), float(self._proposal.one_in)]))
        every, one_in = (int(value) for value in told[len(here) :].tolist())
        self.plan = Plan(every, one_in)
        return [bool(flag) for flag in told[: len(here)].tolist()]

    def done(
        self, step: int, *, deep: bool, ordinary: bool, began: float, now: float, own: float, checking: float
    ) -> None:
        """Note that a step's hold ends now.

        Parameters
        ----------
        step, deep
            The step, and whether it was a deep one.
        ordinary
            Nothing was replayed in it, so that its times say something of others.
        began, now
            When its first forward did, and the time now, by `tap.timer.stopwatch`.
        own, checking
            Seconds of it that the guard took, and of these the operators' checks.

        """
        whole = None if self._ended is None else now - self._ended
        self._ended = now if ordinary and not deep else None
        if deep:
            self.taken += 1
            self._last = step
        if not ordinary:
            return
        if deep:
            self.budget.note_deep(now - began, checking, self.plan.one_in)
        elif whole is not None:
            self.budget.note_light(now - began, own, whole)

    def report(self) -> dict[str, Any]:
        """Return the price and what it buys, ready for JSON."""
        if self._fixed is not None:
            return {"deep_every": self._fixed}
        return self.budget.report(self.plan)
