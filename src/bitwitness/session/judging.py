"""A step whose gradients are complete, and those who judge it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitwitness.capture.light import LightStep
from bitwitness.capture.lossgraph import LossGraph
from bitwitness.capture.step import StepRecord
from bitwitness.capture.training import Wants
from bitwitness.session.instrument import Instrument
from bitwitness.stats import Features

if TYPE_CHECKING:
    from bitwitness.session.reader import StepReader


@dataclass(frozen=True, slots=True)
class CompleteStep:
    """A step whose gradients are complete and not used yet.

    Attributes
    ----------
    record
        What was captured of it.
    features, light
        Its local gradients, on their device, and their sizes on the host; None where no backward was seen that
        synchronises them.
    stepped_early
        Whether an optimizer ran inside its backward.

    """

    record: StepRecord
    features: Features | None
    light: LightStep | None
    stepped_early: bool


class StepJudge(Instrument):
    """An instrument that judges whole steps, as a `StepReader` reads them."""

    reader: StepReader
    wants: Wants

    def judge(self, step: CompleteStep) -> None:
        """Judge a step whose gradients are complete; all ranks come here together."""

    def gradients_left(self, record: StepRecord) -> None:
        """The backward that is taken for a step's last has ended: the gradients are complete, and nobody has used them."""

    def judged(self, step: CompleteStep) -> None:
        """All have judged a step; what it took is known."""

    def judge_unused(self, graph: LossGraph) -> None:
        """Judge a loss that is not finite and was never backpropagated: scripts skip such steps, or stop at them."""

    def parameters_changed(self) -> None:
        """The script has frozen or unfrozen parameters: others are read from now on. All ranks do so at the same step."""
