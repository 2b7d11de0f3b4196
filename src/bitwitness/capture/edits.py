"""Whether the gradients that an optimizer is about to use are still those that the backward left.

By their versions at every step, by their sizes before a replay may speak: code that writes through ``.data`` (clipping by
hand, in the classic DQN script) leaves no mark on a version.
"""

from __future__ import annotations

from bitwitness.capture.gradients import LocalGradients
from bitwitness.capture.ledger import Change
from bitwitness.capture.root import RootTap
from bitwitness.capture.step import StepRecord

BY_HAND = "the gradients did not come from a backward that adds to them"
FEWER = "fewer backwards than in the step before: it is not known whether the script changed gradients after the last"
EDITED = "the script changes gradients between its backward and their use"


class Edits:
    """Reads one root's gradients when a backward has ended, and compares them with what there is when they are used.

    Parameters
    ----------
    root, gradients
        The root's taps.

    """

    def __init__(self, root: RootTap, gradients: LocalGradients) -> None:
        self._root = root
        self._gradients = gradients
        self._backwards = 0
        self._before = 1
        self._short = False

    def backward_ended(self) -> None:
        """Read the gradients before the script's own code can change them; of several backwards, after the last of a step.

        Which one that is, is told by the step before.
        """
        self._backwards += 1
        self._gradients.backward_ended(read=self.last)

    @property
    def last(self) -> bool:
        """Whether the backward that ended is the step's last, as far as the step before tells."""
        return self._backwards >= self._before

    def cleared(self) -> None:
        """Forget the backwards of this step: the gradients were zeroed."""
        self._backwards = 0

    def step_ended(self) -> None:
        """Expect as many backwards in the next step."""
        self._before, self._backwards = max(1, self._backwards), 0

    def look(self, record: StepRecord) -> None:
        """See, by identities and versions, whether the script changed gradients since its backward."""
        self._short = 0 < self._backwards < self._before and self._gradients.mode == "hold"
        if self._root.ledger.change() is not Change.NONE:
            self._edited(record)

    def look_closely(self, record: StepRecord) -> None:
        """See it by the values; waits for the device."""
        if self._short:
            record.give_up(FEWER)
        elif not self._gradients.untouched() or not self._gradients.reduced_untouched():
            self._edited(record)

    def _edited(self, record: StepRecord) -> None:
        if self._gradients.mode == "hold":
            record.give_up(EDITED)
        record.unhealable = f"not healed: {EDITED}"
