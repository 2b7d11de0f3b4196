"""What is left of a guard or a recorder while it looks away: it goes on counting steps, so that all count the same."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim.optimizer import Optimizer

from bitwitness.tap.clock import StepClock
from bitwitness.tap.holdpoints import StepListener


class StepCounter(StepListener):
    """Tells a clock of the steps that end; to be entered with ``HoldPoints(…, counting=True)``.

    Parameters
    ----------
    clock
        Counts them.
    ours
        Tells whether an optimizer's steps count.

    Attributes
    ----------
    steps
        How many steps ended meanwhile.

    """

    def __init__(self, clock: StepClock, ours: Callable[[Optimizer], bool]) -> None:
        self._clock = clock
        self._ours = ours
        self._latest = -1
        self.steps = 0

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Parameters changed."""
        if self._ours(optimizer):
            self._end()

    def scaler_updated(self) -> None:
        """A scaler ended the step; its optimizers may have been skipped."""
        self._end()

    def _end(self) -> None:
        self.steps += self._clock.step != self._latest  # two optimizers may end one step
        self._latest = self._clock.step
        self._clock.end_step()
