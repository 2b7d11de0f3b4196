"""Each step of one root, captured once and judged by all who want to, when its gradients are complete."""

from __future__ import annotations

from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.capture.lossgraph import LossGraph
from bitwitness.capture.training import Wants
from bitwitness.ranks import Ranks
from bitwitness.session.capture import CUT, StepCapture
from bitwitness.session.judging import CompleteStep, StepJudge
from bitwitness.session.session import Session
from bitwitness.tap.modes import scripts_modes_off
from bitwitness.tap.moments import BackwardCall
from bitwitness.tap.owners import Owners


class StepReader(StepCapture):
    """Captures and reads the steps of one session's model for all of its judges; parameters as `StepCapture`."""

    def __init__(self, session: Session, ranks: Ranks, wants: Wants, optimizers: list[Optimizer] | None = None) -> None:
        super().__init__(session, ranks, wants, optimizers)
        self.judges: list[StepJudge] = []

    @classmethod
    def of(
        cls, judge: StepJudge, session: Session, ranks: Ranks, optimizers: list[Optimizer] | None = None
    ) -> StepReader:
        """Return the session's reader, which is made if there is none, with ``judge`` among its judges."""
        reader = next((one for one in session.instruments if isinstance(one, StepReader)), None)
        if reader is None:
            reader = cls(session, ranks, judge.wants, optimizers)
            session.add(reader)
        else:
            reader._take_in(judge.wants, optimizers)
        reader.judges.append(judge)
        judge.reader = reader
        return reader

    def _take_in(self, wants: Wants, optimizers: list[Optimizer] | None) -> None:
        """Read for one more judge, who may want more, or mind other optimizers."""
        self.session.resume(self)
        before, self.wants = self.wants, self.wants | wants
        self._optimizers = None if optimizers is None or self._optimizers is None else [*self._optimizers, *optimizers]
        self._owners = Owners(self.root.parameters.values(), self._optimizers)
        if self.wants == before:
            return
        self.root.use(self.wants)
        if self.session.clock.begun:
            self.root.record.give_up(CUT)
        if (self.wants.hashed, self.wants.looks) != (before.hashed, before.looks):
            self._parameters_changed()

    def leave(self, judge: StepJudge) -> None:
        """Judge no more for one; with the last the capture ends."""
        if judge in self.judges:
            self.judges.remove(judge)
            if not self.judges:
                self.session.remove(self)
            self.rest()

    def _parameters_changed(self) -> None:
        self.gradients.close()
        self.session.follow_parameters()
        self._read_anew()
        for judge in self.judges:
            judge.parameters_changed()

    def rest(self) -> None:
        """Rest while all judges do; steps that this cuts through cannot be run again."""
        if self.judges and all(judge.resting for judge in self.judges):
            self.session.pause(self)
        elif self.judges:
            self.session.resume(self)

    def finish(self) -> LossGraph | None:
        """Read what the training left open at its end, alone: other ranks may have ended otherwise, and would not answer.

        Returns the last loss that the script computed and did not backpropagate, if any.
        """
        graph = self.root.window.open_loss(self.root.record)
        if self.wants.unused and not self.session.backward_depth and self.ranks.size == 1:
            self._read(None, unused=True)
        return graph

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, scaler: GradScaler | None, *, unused: bool = False) -> None:
        """Read the step, once after each of its backwards, and have it judged; its record ends here."""
        if not self._complete:
            return
        self._complete = False
        self._forwards_read = self.root.forwards_seen
        record, step = self.root.record, None
        record.step = self.session.step  # it may have been found to be a new one since its forward
        try:
            with self.session.working(), scripts_modes_off():
                with self._safely("reading of a step"), self._timed():
                    step = self._complete_step(record, scaler)
                if step is not None:
                    self._have_judged(step, unused=unused)
        finally:
            self._step.step_ended()
            self.root.record.looked_at = True
            self.root.ledger.forget()
            self.root.window.forget()
        for judge in self._asked(unused=unused) if step is not None else ():
            judge.judged(step)

    def _backward_ended(self, call: BackwardCall) -> None:
        super()._backward_ended(call)
        if not (self._complete and self.edits.last):
            return
        with self.session.working():
            for judge in self.judges:
                if not judge.resting:
                    with self._safely("gradients as they were left"), self._timed():
                        judge.gradients_left(self.root.record)

    def _asked(self, *, unused: bool) -> list[StepJudge]:
        """Return who is asked about a step; of one whose gradients are not used, those that want such, too."""
        return [judge for judge in self.judges if not judge.resting and (judge.wants.unused or not unused)]

    def _have_judged(self, step: CompleteStep, *, unused: bool) -> None:
        known = step.record.unreplayable
        try:
            for judge in self._asked(unused=unused):
                with self._timed():
                    judge.judge(step)
        finally:
            reason = step.record.unreplayable or step.record.unhealable
            if reason is not None:
                tried = step.record.unreplayable is not None and known is None
                (self.refusals if tried else self.limits)[reason] += 1

    def _loss_dropped(self, graph: LossGraph) -> None:
        if not self.session.own_work:
            with self.session.working():
                for judge in self.judges:
                    if judge.wants.unused and not judge.resting:
                        judge.judge_unused(graph)

    def fail(self, part: str, error: Exception) -> None:
        """Say an error of our own once; the step is given up, the training goes on."""
        self.root.record.give_up(f"the guard's {part} failed: {type(error).__name__}")
        for judge in self.judges:
            judge.failed(part, error)
