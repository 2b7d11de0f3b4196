"""The tracer's judgement of a step: is it finite; and if not, who made the first value that is not."""

from __future__ import annotations

from torch.optim.optimizer import Optimizer

from bitwitness.capture.light import LightStep
from bitwitness.capture.lossgraph import LossGraph
from bitwitness.capture.training import Wants
from bitwitness.config import Config
from bitwitness.guard.deepsteps import DeepSteps
from bitwitness.guard.investigation import make_replayer
from bitwitness.guard.operatorsensors import OperatorSensors
from bitwitness.guard.switches import Switches
from bitwitness.guard.tracing import Tracing
from bitwitness.guard.uneven import UnevenSteps
from bitwitness.guard.watch import Watch
from bitwitness.nonfinite.approach import ApproachSensor
from bitwitness.ranks import Ranks
from bitwitness.sense.nonfinite import NonfiniteSensor
from bitwitness.session.judging import CompleteStep
from bitwitness.session.reporter import Reporter
from bitwitness.session.session import Session


class TracerWatch(Watch):
    """Looks for NaN and Inf in one root's steps, and traces them; as `Watch`."""

    def __init__(
        self,
        session: Session,
        ranks: Ranks,
        reporter: Reporter,
        config: Config,
        *,
        optimizers: list[Optimizer] | None,
    ) -> None:
        wants = Wants(config.replay.capture_limit_mib << 20, taped=True, hashed=False, unused=True)
        deep = DeepSteps(config, from_start=True)  # nothing has to be learned first
        super().__init__(session, ranks, reporter, config, wants=wants, deep=deep, optimizers=optimizers)
        self._replayer = make_replayer(self.reader.root, self.reader.gradients)
        self._tracing = Tracing(config, self._replayer, ranks, reporter)
        self._sensor = NonfiniteSensor()
        self.uneven = UnevenSteps(self.reader, ranks, reporter, deep)
        self._operators = self._operator_sensors()

    def _operator_sensors(self) -> OperatorSensors:
        self._switches = Switches(self.reader.root, self.reporter)
        approach = ApproachSensor(self.config.nonfinite.extreme)
        return OperatorSensors(self.reader.root, self._switches, checksum=None, approach=approach)

    def parameters_changed(self) -> None:
        """Look at other parameters from now on."""
        self._replayer = make_replayer(self.reader.root, self.reader.gradients)
        self._tracing.use(self._replayer)
        self._operators = self._operator_sensors()

    def removed(self) -> None:
        """Judge no more; remove every hook."""
        self.uneven.close()
        super().removed()

    def forked(self) -> None:
        """Remove them in a child, too."""
        super().forked()
        self.uneven.close()

    @property
    def operators(self) -> OperatorSensors:
        """The sensors that look at operators."""
        return self._operators

    @property
    def tracing(self) -> Tracing:
        """What follows a step that is not finite."""
        return self._tracing

    def look_at(self, step: CompleteStep) -> bool:
        """Judge a step; return whether it was ordinary."""
        light, record = step.light, step.record
        assert light is not None  # noqa: S101 - `judge` has seen to it
        deep = self.is_deep(record.number)
        bad = self._switches.ask("nonfinite", lambda: self._sensor.look(light))
        if self.uneven.now:
            self.uneven.count()
            for finding in [*bad, *(self.operators.ranges(light) if deep else [])]:
                self.reporter.finding(finding)
            return not bad
        if self.to_look_again(step):
            with self.ranks.together():
                self.operators.look_again(self._replayer, record)
        hit, self._replayer.shared = self.deep.agree(self.ranks, record.number, bool(bad), record.communicates)
        self._follow(step, light, hit=hit)
        for finding in self.operators.ranges(light) if deep else ():
            self._tracing.tell(finding)
        return not hit

    def _follow(self, step: CompleteStep, light: LightStep, *, hit: bool) -> None:
        if not hit:
            self._tracing.clean(light)
            return
        with self.ranks.together():
            self._tracing.hit(step.record, light)

    def judge_unused(self, graph: LossGraph) -> None:
        """Trace a step whose loss is not finite and was never backpropagated."""
        if not self._replayer.lockstep:
            self._tracing.follow_broken_off(self.reader.root.record, graph, self.ranks.rank)

    def finish(self, *, broken_off: bool) -> None:
        """Look at what the training left open.

        ``broken_off``: it ends by an error, as scripts do that stop at a loss of NaN, before its backward perhaps.
        """
        graph = self.reader.finish()
        if broken_off and graph is not None:
            with self.session.working():
                self.judge_unused(graph)
