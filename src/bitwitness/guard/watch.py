"""What the guard and the tracer have in common as judges of steps: deep steps, their price, and what ends a judgement."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.optim.optimizer import Optimizer

from bitwitness.capture.training import Wants
from bitwitness.config import Config
from bitwitness.errors import EXIT_RANK_LOST, SideChannelError, TrainingStopped
from bitwitness.guard.deepsteps import DeepSteps
from bitwitness.guard.description import Description
from bitwitness.guard.operatorsensors import OperatorSensors
from bitwitness.guard.tracing import Tracing
from bitwitness.guard.uncovered import UNSEEN
from bitwitness.ranks import Ranks
from bitwitness.respond.final import PROCESS
from bitwitness.session.instrument import Forward, Kind
from bitwitness.session.judging import CompleteStep, StepJudge
from bitwitness.session.reader import StepReader
from bitwitness.session.reporter import Reporter
from bitwitness.session.session import Session
from bitwitness.tap.moments import BackwardCall

_STEPS_UNSEEN = 3  # a script's model may be found in its first forward, which goes by


class Watch(StepJudge):
    """Judges one root's steps.

    Parameters
    ----------
    session, ranks, reporter
        Whose steps these are, who trains together, and where findings go.
    config
        How to judge.
    wants
        What is needed of each step.
    deep
        Decides which steps' operators are looked at.
    optimizers
        Those whose steps count; None takes every optimizer that holds one of the root's parameters.

    """

    def __init__(
        self,
        session: Session,
        ranks: Ranks,
        reporter: Reporter,
        config: Config,
        *,
        wants: Wants,
        deep: DeepSteps,
        optimizers: list[Optimizer] | None,
    ) -> None:
        self.session, self.ranks, self.reporter, self.config, self.wants = session, ranks, reporter, config, wants
        self.deep = deep
        self.judged_times = 0
        self.steps_judged = 0
        self._last_judged: int | None = None
        self.last_ended: float | None = None
        """Unix time at which the last step was judged."""
        self.last_took: float | None = None
        """Seconds from the one before to it."""
        self.description = Description(reporter)
        self.reader = StepReader.of(self, session, ranks, optimizers)
        self._own_before = 0.0
        self._look_again_at = -1
        self._ordinary = False
        self._ended_before = self._missed = 0
        self.late = 0
        """Steps in which the model was trained before it was found, at least."""
        self.forwards: Counter[Kind] = Counter()
        """Calls of the model, by what they were for."""
        self.inherited = False
        """Whether this is a forked child, whose parent it is that watches."""

    # -- what the two do each in their way -----------------------------------------------------------------------

    @property
    def operators(self) -> OperatorSensors:
        """The sensors that look at operators."""
        raise NotImplementedError

    @property
    def tracing(self) -> Tracing:
        """What follows a step that is not finite."""
        raise NotImplementedError

    def look_at(self, step: CompleteStep) -> bool:
        """Judge a step whose sizes were read; return whether it was ordinary: nothing of it was run again."""
        raise NotImplementedError

    @property
    def ranges(self) -> bool:
        """Whether the next deep step measures how close results come to the ends of their dtypes."""
        return True

    # -- moments -------------------------------------------------------------------------------------------------

    @contextmanager
    def around_forward(self, forward: Forward) -> Iterator[None]:
        """Count a forward; look at the operators of a training forward, on a deep step."""
        self.forwards[forward.kind] += 1
        with self._deep_tap("capture") if forward.kind is Kind.TRAINING else nullcontext():
            yield

    @contextmanager
    def around_backward(self, call: BackwardCall) -> Iterator[None]:
        """Look at the operators of a backward, on a deep step."""
        del call
        with self._deep_tap("backward") if self.session.backward_depth == 1 else nullcontext():
            yield

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Note who changes parameters."""
        if self.reader.steps_for(optimizer):
            self.tracing.stepped(optimizer)
            self.description.stepped(optimizer)
            if self.reader.optimizer_steps == _STEPS_UNSEEN and self.reader.unseen:
                self.reporter.once(UNSEEN)

    def paused(self) -> None:
        """Judge nothing until `resumed`."""
        self._ended_before = self.session.clock.ended
        self.reader.rest()

    def resumed(self) -> None:
        """Judge again."""
        self._missed += self.session.clock.ended - self._ended_before
        self.reader.rest()

    @property
    def missed(self) -> int:
        """How many steps went by while it was paused."""
        return self._missed + (self.session.clock.ended - self._ended_before if self.resting else 0)

    def removed(self) -> None:
        """Judge no more."""
        self.reader.leave(self)

    def forked(self) -> None:
        """Say nothing in a child."""
        self.inherited = True

    # -- deep steps ----------------------------------------------------------------------------------------------

    def _deep_tap(self, part: str) -> AbstractContextManager[Any]:
        """Return the tap of a deep step; compiled code is looked at in a replay instead (`OperatorSensors.look_again`)."""
        try:
            if not self.is_deep(self.reader.root.record.number):
                return nullcontext()
            if self.reader.root.regions.present():
                self._look_again_at = self.reader.root.record.number
                return nullcontext()
            return self.operators.tap(ranges=self.ranges) or nullcontext()
        except Exception as error:
            self.reader.fail(part, error)
            return nullcontext()

    def is_deep(self, number: int) -> bool:
        """Tell whether a step's operators are looked at: the same steps on all ranks."""
        return self.deep.is_deep(number)

    def to_look_again(self, step: CompleteStep) -> bool:
        """Tell whether a step was to be deep, and runs compiled code, so that it is to be executed once more."""
        # With ranks that talk inside their forwards, all would have to agree first.
        return self._look_again_at == step.record.number and not step.record.communicates

    @property
    def own_seconds(self) -> float:
        """Seconds that this judge and the reader attribute to themselves so far, by `tap.timer.stopwatch`."""
        return self.reader.own_seconds

    def spent_outside(self) -> float:
        """Return the seconds that were spent on the next deep step before it began, since the last one."""
        return 0.0

    def judged(self, step: CompleteStep) -> None:
        """Tell the budget what a step took."""
        own, self._own_before = self.own_seconds - self._own_before, self.own_seconds
        deep = self.is_deep(step.record.number)
        self.deep.done(
            step.record.number,
            deep=deep,
            ordinary=self._ordinary,
            began=step.record.began - (self.spent_outside() if deep else 0.0),
            now=self.reader.root.now(),
            own=own,
            checking=self.operators.take_checking_seconds(),
        )

    # -- judging -------------------------------------------------------------------------------------------------

    def judge(self, step: CompleteStep) -> None:
        """Judge a step whose gradients are complete.

        Raises
        ------
        TrainingStopped
            If a verdict says so, or another rank is lost.

        """
        self._ordinary = False
        with self._stop_declared():
            try:
                if step.light is None:
                    self.reporter.once(
                        "no synchronising backward was seen before the optimizer's step; the step is not covered"
                    )
                else:
                    self._count()
                    self.description.held(step.record)
                    self._ordinary = self.look_at(step)
            except SideChannelError as error:
                missing = self.reporter.rank_lost(error, self.ranks, self.session.step)
                raise TrainingStopped(EXIT_RANK_LOST, missing) from error
            except Exception as error:
                self.reader.fail("judgement of a step", error)

    @contextmanager
    def _stop_declared(self) -> Iterator[None]:
        """Make a stop that is raised inside final, for the process and for what the run folder says."""
        try:
            with PROCESS.declared():
                yield
        except TrainingStopped as stop:
            if PROCESS.stop is not None:
                self.session.run.ended_by(stop)
            raise

    def _count(self) -> None:
        """Count gradients that are judged; an optimizer's closure may be asked for some several times in a step."""
        self.judged_times += 1
        if self._last_judged != self.session.step:
            self._last_judged = self.session.step
            self.steps_judged += 1
            now = time.time()
            self.last_took, self.last_ended = None if self.last_ended is None else now - self.last_ended, now

    def failed(self, moment: str, error: Exception) -> None:
        """Say an error of our own once."""
        self.reporter.failure(moment, error, self.session.step)
