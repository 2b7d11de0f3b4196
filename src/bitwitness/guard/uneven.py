"""Steps inside ``join()``: each rank looks at its own gradients, and asks no other, which may have no step to compare.

Nothing is run again meanwhile and nothing proven, healed or stopped: a rank alone cannot, without leaving the others behind.
Afterwards the ranks' step numbers differ; all go on from the largest. Their optimizers may differ, too, and with them soon the
weights: torch leaves that to the script. Then no rank can speak for another any more, and each goes on for itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import nn

from bitwitness.finding import Cause, Finding, Note
from bitwitness.guard.deepsteps import DeepSteps
from bitwitness.guard.limits import INSIDE_JOIN, PARTED_BY_JOIN
from bitwitness.guard.sensors import Sensors
from bitwitness.judge.judge import Outcome
from bitwitness.ranks import Ranks
from bitwitness.respond.reporter import Reporter
from bitwitness.sense.light import LightStep
from bitwitness.tap.clock import StepClock
from bitwitness.tap.uneven import JoinTap

_STAYED = (
    "the ranks did not leave a join() together, or could not agree on their steps after it: each goes on for itself"
)


class UnevenSteps:
    """Leads one root's steps while its ranks train unevenly.

    Parameters
    ----------
    model, parameters
        What the training calls, and what it trains.
    ranks, reporter, sensors, clock, deep
        The parts of the guard that work together with other ranks otherwise.

    """

    def __init__(
        self,
        model: nn.Module,
        parameters: list[nn.Parameter],
        ranks: Ranks,
        reporter: Reporter,
        sensors: Sensors,
        clock: StepClock,
        deep: DeepSteps,
    ) -> None:
        self._ranks, self._reporter, self.sensors = ranks, reporter, sensors
        self._clock, self._deep = clock, deep
        self.now = False
        """Whether the ranks train unevenly now."""
        self.before = False
        """Whether they ever did: weights that differ are not the hardware's doing since."""
        self._parted = False
        self._tap = JoinTap(model, parameters, self._enter, self._leave)

    def close(self) -> None:
        """Hear no more of it."""
        self._tap.close()

    def look(self, light: LightStep, limits: Counter[str], *, deep: bool) -> bool:
        """Look at a step alone, and count why; return whether it was ordinary."""
        limits[PARTED_BY_JOIN if self._parted else INSIDE_JOIN] += 1
        findings: list[Finding] = self.sensors.look(light, deep=deep, scale=light.scale)
        findings += self.sensors.ranges(light) if deep else []
        for finding in findings:
            self._reporter.finding(finding)
        self.sensors.learn(light)
        return not findings

    def interpret(self, outcome: Outcome) -> Outcome:
        """Blame no device for weights that a join may have parted; go on alone, on all ranks, if there are such."""
        if self.before and outcome.verdict.cause is Cause.CORRUPT_STATE:
            self._parted = self.now = self.sensors.alone = True
            message = (
                f"{PARTED_BY_JOIN}; each rank senses its own gradients from here on, and nothing is proven or healed"
            )
            outcome.verdict = replace(outcome.verdict, cause=Cause.SOFTWARE, ranks=(), message=message)
        return outcome

    def _enter(self) -> None:
        self.now = self.sensors.alone = self.before = self._ranks.size > 1

    def _leave(self) -> None:
        """Go on from the same step as all others; collective."""
        if not self.now or self._parted:
            return
        try:
            step = int(self._ranks.max(torch.tensor([self._clock.step], dtype=torch.int64)))
        except Exception as error:  # whoever is missing will be missed by the training's own collectives
            self._reporter.note(Note(f"{_STAYED} ({error})", self._clock.step, self._ranks.rank), speak=True)
            return
        self._clock.go_on_after(step)
        self._deep.begin_again(step)
        self.now = self.sensors.alone = False
