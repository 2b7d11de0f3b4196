"""Steps inside ``join()``: each rank looks at its own gradients, and asks no other, which may have no step to compare.

Nothing is run again meanwhile and nothing proven, healed or stopped: a rank alone cannot, without leaving the others behind.
Afterwards the ranks' step numbers differ; all go on from the largest. Their optimizers may differ, too, and with them soon the
weights: torch leaves that to the script. Then no rank can speak for another any more, and each goes on for itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bitwitness.finding import Cause, Note
from bitwitness.guard.deepsteps import DeepSteps
from bitwitness.guard.uncovered import INSIDE_JOIN, PARTED_BY_JOIN
from bitwitness.judge.verdict import Outcome
from bitwitness.ranks import Ranks
from bitwitness.session.reader import StepReader
from bitwitness.session.reporter import Reporter
from bitwitness.tap.uneven import JoinTap

_STAYED = (
    "the ranks did not leave a join() together, or could not agree on their steps after it: each goes on for itself"
)


class UnevenSteps:
    """Leads one root's steps while its ranks train unevenly.

    Parameters
    ----------
    reader
        Reads the root's steps.
    ranks, reporter, deep
        The parts of the watch that work together with other ranks otherwise.
    alone
        Told whether sensors are to ask no other rank.

    """

    def __init__(
        self,
        reader: StepReader,
        ranks: Ranks,
        reporter: Reporter,
        deep: DeepSteps,
        alone: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._reader, self._ranks, self._reporter, self._deep = reader, ranks, reporter, deep
        self._alone = alone
        self.now = False
        """Whether the ranks train unevenly now."""
        self.before = False
        """Whether they ever did: weights that differ are not the hardware's doing since."""
        self._parted = False
        parameters = list(reader.root.parameters.values())
        self._tap = JoinTap(reader.session.model, parameters, self._enter, self._leave)

    def close(self) -> None:
        """Hear no more of it."""
        self._tap.close()

    def count(self) -> None:
        """Count a step that is looked at alone, and why."""
        self._reader.limits[PARTED_BY_JOIN if self._parted else INSIDE_JOIN] += 1

    def interpret(self, outcome: Outcome) -> None:
        """Blame no device for weights that a join may have parted; go on alone, on all ranks, if there are such."""
        if self.before and outcome.verdict.cause is Cause.CORRUPT_STATE:
            self._parted = self.now = True
            self._alone(self.now)
            outcome.parted(
                f"{PARTED_BY_JOIN}; each rank senses its own gradients from here on, and nothing is proven or healed"
            )

    def _enter(self) -> None:
        self.now = self.before = self._ranks.size > 1
        self._alone(self.now)

    def _leave(self) -> None:
        """Go on from the same step as all others; collective."""
        if not self.now or self._parted:
            return
        clock, record = self._reader.session.clock, self._reader.root.record
        try:
            here = torch.tensor([clock.step, record.number], dtype=torch.int64)
            step, number = (int(value) for value in self._ranks.max(here).tolist())
        except Exception as error:  # whoever is missing will be missed by the training's own collectives
            self._reporter.note(Note(f"{_STAYED} ({error})", clock.step, self._ranks.rank), speak=True)
            return
        clock.go_on_with(step + 1)
        record.number = number
        self._deep.begin_again(number)
        self.now = False
        self._alone(self.now)
