"""The guard's judgement of a step: what its sensors say, and what follows from that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.capture.light import LightStep
from bitwitness.capture.step import StepRecord
from bitwitness.capture.training import Wants
from bitwitness.config import Config
from bitwitness.finding import Finding
from bitwitness.guard.byparameters import ByParameters
from bitwitness.guard.deepsteps import DeepSteps
from bitwitness.guard.followup import FollowUp
from bitwitness.guard.investigation import Investigation
from bitwitness.guard.keptgradients import KeptGradients
from bitwitness.guard.lostverdicts import LostVerdicts
from bitwitness.guard.operatorsensors import OperatorSensors
from bitwitness.guard.proven import Proven
from bitwitness.guard.roots import seen_beside
from bitwitness.guard.sensors import Sensors
from bitwitness.guard.statesensors import StateSensors
from bitwitness.guard.tracing import Tracing
from bitwitness.guard.uneven import UnevenSteps
from bitwitness.guard.watch import Watch
from bitwitness.judge.verdict import Outcome
from bitwitness.ranks import Ranks
from bitwitness.sense.held import HeldState
from bitwitness.sense.nonfinite import failed_on, unused_losses
from bitwitness.session.instrument import Forward
from bitwitness.session.judging import CompleteStep
from bitwitness.session.reporter import Reporter
from bitwitness.session.session import Session
from bitwitness.tap.compiled import distributed
from bitwitness.tap.modes import scripts_modes_off
from bitwitness.tap.moments import BackwardCall
from bitwitness.tap.traffic import TrafficCount

# Ranges change slowly, and few trainings have narrow dtypes that overflow: they are measured on some deep steps.
_RANGES_EVERY = 4


class GuardWatch(Watch):
    """Judges one root's steps by all sensors; proves, heals and stops as configured.

    Parameters
    ----------
    session, ranks, reporter, config, optimizers
        As for `Watch`.
    clock
        Returns seconds; times the reference schemes' strikes and checksum windows.

    """

    def __init__(
        self,
        session: Session,
        ranks: Ranks,
        reporter: Reporter,
        config: Config,
        *,
        optimizers: list[Optimizer] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        wants = Wants(
            config.replay.capture_limit_mib << 20,
            taped=config.nonfinite.enabled or config.replay.enabled,
            hashed=True,
            unused=False,
            looks=config.activations.enabled or config.weights.enabled,
        )
        super().__init__(session, ranks, reporter, config, wants=wants, deep=DeepSteps(config), optimizers=optimizers)
        looked_at = 0 if self.reader.looks is None else len(self.reader.looks.paths)
        self.traffic = TrafficCount()
        self.self_tests: dict[str, str] = {}
        """What came of each sensor's self-test, by name; empty where none was made."""
        self.sensors = Sensors(config, self.reader.root, ranks, reporter, clock, modules=looked_at)
        reducing = distributed(self.reader.root.wrapper)
        held = HeldState(self.reader.root.root, broadcasts=reducing is not None and bool(reducing.broadcast_buffers))
        self.investigation = Investigation(config, self.reader.root, self.reader.gradients, ranks, reporter, held)
        deep = self.is_deep if self.deep.enabled else None
        self.state = StateSensors(config, held, ranks, reporter, self.sensors.switches, self.reader.root.now, deep)
        if reducing is not None:
            self.sensors.exact.hear_buffers(reducing, self._before_deep)
        self.uneven = UnevenSteps(self.reader, ranks, reporter, self.deep, self._ask_nobody)
        self.investigation.interpret = self._interpret
        self.kept = KeptGradients(
            lambda: self.reader.root.parameters, ranks, reporter, self.sensors.switches, self.state.seal_due
        )
        self.proven = Proven(ranks)
        self._lost = LostVerdicts(
            lambda: self.sensors.exact.mismatch or self.proven.mismatch, lambda: self.investigation.devices
        )
        self._investigations: ByParameters[Investigation] = ByParameters()
        self._follow_up = FollowUp(self.reader, self.sensors, self.investigation, self.deep, ranks, self.kept)

    def parameters_changed(self) -> None:
        """Judge other parameters from now on."""
        names = self.sensors.names
        self.sensors.follow()
        before = self._investigations.exchange(names, self.investigation, self.sensors.names)
        self.investigation = self.investigation.renewed(self.reader.gradients, before)
        self._follow_up = FollowUp(self.reader, self.sensors, self.investigation, self.deep, self.ranks, self.kept)

    def removed(self) -> None:
        """Judge no more; remove every hook."""
        self.uneven.close()
        self.sensors.close()
        super().removed()

    def forked(self) -> None:
        """Remove them in a child, too."""
        super().forked()
        self.uneven.close()
        self.sensors.close()

    def _interpret(self, outcome: Outcome) -> None:
        self._lost.interpret(outcome)
        self.uneven.interpret(outcome)

    def _ask_nobody(self, alone: bool) -> None:
        self.sensors.alone = alone

    @property
    def operators(self) -> OperatorSensors:
        """The sensors that look at operators."""
        return self.sensors.operators

    @property
    def own_seconds(self) -> float:
        """Seconds that this judge and the reader attribute to themselves so far."""
        return super().own_seconds + self.state.timed.seconds

    def spent_outside(self) -> float:
        """Return the seconds that were spent on the next deep step before it began, since the last one."""
        return self.state.charge()

    @property
    def left_open(self) -> int:
        """Changes of memory that are neither the script's, as far as was seen, nor proven to be a fault's."""
        return self.state.seals.left_open + self.kept.seals.left_open

    @property
    def explained(self) -> int:
        """Suspicions of the seals that turned out to be the script's own writes."""
        return self.state.seals.explained + self.kept.seals.explained

    @property
    def tracing(self) -> Tracing:
        """What follows a step that is not finite."""
        return self.investigation.tracing

    @property
    def ranges(self) -> bool:
        """Whether the next deep step measures ranges."""
        return self.deep.taken % _RANGES_EVERY == 0

    def is_deep(self, number: int) -> bool:
        """Tell whether a step's operators are looked at: the same steps on all ranks."""
        return super().is_deep(number) or (self.config.checksum.enabled and self.sensors.reference.checksum_on)

    def _before_deep(self) -> bool:
        """Tell whether a training forward that began now would be of a deep step."""
        return not self.resting and self.is_deep(self.reader.root.coming)

    # -- a step that is skipped keeps its gradients, away from the optimizer -------------------------------------

    @contextmanager
    def around_forward(self, forward: Forward) -> Iterator[None]:
        """Look at buffers before they may be written; look at operators."""
        if self.state.holds_buffers:
            with self.session.working(), scripts_modes_off():
                self.state.forward_begins()
        with super().around_forward(forward):
            yield

    @contextmanager
    def around_backward(self, call: BackwardCall) -> Iterator[None]:
        """Let go of gradients that were skipped, before others are added; look at operators."""
        if call.accumulates:
            self.investigation.skip.before_backward(self.reader.root.record.number)
        with super().around_backward(call):
            yield

    def gradients_ready(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Take gradients away that are not to be used."""
        if optimizer is not None:
            self.state.before_step(optimizer)
        if optimizer is not None and scaler is None:
            self.investigation.skip.before_step(optimizer)
            self._about_to_update(optimizer)

    def closure_ended(self, optimizer: Optimizer) -> None:
        """Keep what is about to be stepped."""
        self._about_to_update(optimizer)

    def _about_to_update(self, optimizer: Optimizer) -> None:
        if self.reader.steps_for(optimizer) and not self.session.backward_depth:
            with self.session.working(), scripts_modes_off():
                self.state.before_update(optimizer)

    def closure_begins(self, optimizer: Optimizer) -> None:
        """Mind that the closure may lead to a skip."""
        self.state.before_step(optimizer)
        self.investigation.skip.before_step(optimizer)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Put back what was taken away."""
        self.investigation.skip.after_step(optimizer)
        if self.reader.steps_for(optimizer) and not self.session.backward_depth:
            with self.session.working(), scripts_modes_off():
                self.state.after_step(optimizer, self.reader.root.record.number + 1, self.session.step)
        super().optimizer_stepped(optimizer)

    def gradients_left(self, record: StepRecord) -> None:
        """Keep what a backward has left in mind."""
        self.kept.left(record.number)

    # -- judging -------------------------------------------------------------------------------------------------

    def look_at(self, step: CompleteStep) -> bool:
        """Judge a step; return whether it was ordinary."""
        light, record = step.light, step.record
        assert light is not None  # noqa: S101 - `judge` has seen to it
        self.traffic.note()
        deep = self.is_deep(record.number)
        if deep:
            self._mind_unused()
        if self.uneven.now:
            return self._look_alone(light, deep=deep)
        if self.to_look_again(step):
            self._follow_up.look_again(record)
        findings = self.sensors.look(light, deep=deep, scale=light.scale)
        findings += seen_beside(self.session.root, light.rank)
        compare = None if self.uneven.before else self.investigation.compare_replicas
        findings += self.state.look(record, light, compare, deep=deep)
        findings += self.kept.look(light, record.number, alone=compare is None)
        together = compare is not None and (deep or self.state.seal_due(record.number))
        self.proven.settle(findings, together=together)
        return self._follow_up.follow(step, light, findings, deep=deep)

    def finish(self, *, broken_off: bool) -> None:
        """Look at what the training left open; ``broken_off``: it ends by an error, as one of a loss function."""
        self.reader.leave_open()
        with self.session.working():
            if not self._mind_unused() and broken_off and self.config.nonfinite.enabled:
                self._mind_output()

    def _mind_output(self) -> None:
        """Tell of an output that is not finite, and that the script failed on; waits for the device."""
        record = self.reader.root.record
        value = self.reader.root.window.open_output(record)
        if value is not None:
            self.tracing.tell(failed_on(record.step, value, self.ranks.rank))

    def _mind_unused(self) -> bool:
        """Tell of losses that the script let go unused, and that are not finite, if any; waits for the device."""
        bad = self.reader.root.window.unused.not_finite()
        if bad and self.config.nonfinite.enabled:
            self.tracing.tell(unused_losses(bad, self.ranks.rank))
        return bool(bad)

    def _look_alone(self, light: LightStep, *, deep: bool) -> bool:
        """Look at a step that may have no counterpart on other ranks, and run nothing again."""
        self.uneven.count()
        findings: list[Finding] = self.sensors.look(light, deep=deep, scale=light.scale)
        findings += self.operators.ranges(light) if deep else []
        for finding in findings:
            self.reporter.finding(finding)
        self.sensors.learn(light)
        return not findings
