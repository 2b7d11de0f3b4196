"""From a suspicious step to a verdict that was acted on: when to ask, whom to tell, when to stop asking."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from bitwitness.capture.gradients import LocalGradients
from bitwitness.capture.light import LightStep
from bitwitness.capture.root import RootTap
from bitwitness.capture.step import StepRecord
from bitwitness.config import Config
from bitwitness.device import this_device
from bitwitness.errors import EXIT_ELSEWHERE, SideChannelError, TrainingStopped
from bitwitness.finding import Action, Cause, Device, Finding, Note, Severity, Verdict
from bitwitness.guard.kinds import NewKinds
from bitwitness.guard.roots import unguarded_among
from bitwitness.guard.tracing import Tracing
from bitwitness.judge.devices import gather_devices
from bitwitness.judge.experiments import ReplayExperiments
from bitwitness.judge.fingerprint import NEAR, Fingerprint
from bitwitness.judge.judge import Judge
from bitwitness.judge.replicas import Desync
from bitwitness.judge.replicated import Replicas
from bitwitness.judge.verdict import Outcome, numbered_in_job
from bitwitness.ranks import Ranks
from bitwitness.replay.lockstep import LockstepReplayer
from bitwitness.replay.run import Replayer
from bitwitness.respond.act import HealTarget, Responder
from bitwitness.respond.reference_log import alert_fields
from bitwitness.respond.watchdog import Watchdog
from bitwitness.sense.held import HeldState, Reading
from bitwitness.session.reporter import Reporter
from bitwitness.tap.compiled import distributed, is_compiled

# Healthy steps that are replayed to learn how far executions spread: soon, since kernels are chosen and caches filled in the
# first steps; then rarely, since a replay costs three steps: 0.3 % of a thousand.
_CALIBRATIONS = (1, 3, 10)
_CALIBRATE_EVERY = 1000
_LONGEST_REST = 1024  # steps; doubling is bounded, so that a sensor that was wrong for long is heard again
_RECHECKS = 3  # steps replayed after one that came out otherwise: what comes back is the script's own doing
_EXACT = ("checksum", "twice", "replicas", "seal", "gradients", "optimizer", "collective", "recompute")
NO_FAULT = (Cause.DISMISSED, Cause.INCONCLUSIVE, Cause.DATA, Cause.SOFTWARE)


Kind = TypeVar("Kind", bound=Replayer)


def _replayer(kind: type[Kind], root: RootTap) -> Kind:
    return kind(
        root.root,
        root.parameters,
        root.device,
        entry=root.entry,
        regions=root.regions,
        held=root.capturer.held,
        keeper=root.capturer.buffers,
    )


def make_replayer(root: RootTap, gradients: LocalGradients) -> Replayer:
    """Return what runs this root's steps again: one rank by itself, or all together where parameters are sharded."""
    if gradients.reduce_tap is None:
        return _replayer(Replayer, root)
    replayer = _replayer(LockstepReplayer, root)
    replayer.use(gradients.reduce_tap, gradients.joined)
    return replayer


class Investigation:
    """Leads one root's suspicions to verdicts."""

    def __init__(
        self,
        config: Config,
        root: RootTap,
        gradients: LocalGradients,
        ranks: Ranks,
        reporter: Reporter,
        held: HeldState,
        devices: list[Device] | None = None,
    ) -> None:
        self._config = config
        self._held = held
        self._ranks = ranks
        self._reporter = reporter
        self._root = root
        parameters = list(root.parameters.values())
        low = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters)
        self.replayer = make_replayer(root, gradients)
        if not config.replay.enabled:
            self.replayer.end("`replay.enabled` is false")
        self.experiments = ReplayExperiments(ranks, self.replayer, NEAR["low" if low else "full"])
        self.devices = devices or gather_devices(ranks, this_device(root.device))
        reducing = distributed(root.wrapper)
        # Around a compiled DistributedDataParallel buffers are captured before they are broadcast.
        broadcasts = reducing is not None and reducing.broadcast_buffers and not is_compiled(root.wrapper)
        self.replicas = Replicas(ranks, root.root, held, root.sharding, broadcasts=broadcasts)
        self._judge = Judge(self.experiments, self.replicas, devices=self.devices)
        healable = HealTarget(
            root.wrapper, root.root, parameters, self.replayer, gradients.collect, gradients.take, unguarded_among
        )
        self.tracing = Tracing(config, self.replayer, ranks, reporter)
        self._watchdog = Watchdog(ranks, reporter, config.ranks.deadline_s)
        self._responder = Responder(config.act, ranks, healable, self._watchdog)
        self.skip = self._responder.skip
        self._no_fault_in_a_row = 0
        self._rechecks = 0
        self._rests_until = -1
        self.interpret: Callable[[Outcome], None] = lambda _: None
        """Told of every outcome, by who knows more of the ranks."""
        self.verdicts: list[Verdict] = []
        self.suspicions = 0
        self.dismissed = 0
        self.left_open = 0
        """Suspicions that nothing confirmed, and that could not be dismissed."""
        self.stopped_at = ""
        """The anomaly at which the training was stopped without proof; empty where it was not."""
        self._said: set[tuple[str, bool]] = set()
        self._kinds = NewKinds()

    def renewed(self, gradients: LocalGradients, before: Investigation | None) -> Investigation:
        """Return the same for other parameters of the same root; what was concluded so far is kept.

        ``before``: the last one of just these parameters, whose experiments go on.
        """
        new = Investigation(self._config, self._root, gradients, self._ranks, self._reporter, self._held, self.devices)
        new.verdicts, new.suspicions, new.dismissed = self.verdicts, self.suspicions, self.dismissed
        new.interpret, new._rechecks = self.interpret, self._rechecks
        new.skip = new._responder.skip = self.skip
        self.skip.use(list(self._root.parameters.values()))
        new.left_open, new._said = self.left_open, self._said
        new.replicas.remember(self.replicas)
        if before is not None:
            new.experiments.remember(before.experiments)
        new.experiments.covered = self.experiments.covered
        new.tracing = self.tracing
        new.tracing.use(new.replayer)
        return new

    def worth_asking(self, findings: list[Finding]) -> list[Finding]:
        """Record findings; return those that call for experiments.

        After experiments that found nothing again and again, statistical suspicions rest for 1, 2, 4, … steps, so that a
        model that has changed its ways does not pay for a replay at every step. An exact sensor's suspicion never rests.
        """
        for finding in findings:
            self._reporter.finding(finding)
        loud = [finding for finding in findings if finding.severity is not Severity.INFO]
        if self._config.replay.rest and self._rests_until >= self._root.record.number:
            return [finding for finding in loud if finding.sensor in _EXACT]
        return loud

    def question(self, record: StepRecord, original: Fingerprint, findings: list[Finding], light: LightStep) -> Cause:
        """Prove or dismiss, act, tell; collective. Return the verdict's cause.

        Raises
        ------
        TrainingStopped
            If the configured response to the verdict is to stop.

        """
        self.suspicions += 1
        loud = [finding for finding in findings if finding.severity is not Severity.INFO]
        if self._config.act == "stop":
            self._stop_unproven([f for f in loud if f.severity is Severity.ERROR], record.step)
        self._know_precision(record)
        with self._watchdog.over(record.step) if self.replayer.lockstep else nullcontext():
            outcome = self._judge.question(
                record, original, loud, partial(self.tracing.follow, record, light), light.l2
            )
        self.tracing.applied(light)
        self._rechecks = _RECHECKS if outcome.came_out_otherwise else 0
        earlier = next((v for v in self.verdicts if v.cause not in NO_FAULT and v.action is Action.REPORTED), None)
        if earlier is not None:
            outcome.follows(earlier)
        self.interpret(outcome)
        outcome.suspected(self._suspicions(loud), alert_fields())
        verdict, code = self._responder.respond(outcome, record)
        verdict = numbered_in_job(verdict, self._ranks.members)
        self._announce(verdict, loud, differs=outcome.differs)
        if code is not None:
            self._stop(verdict, code)
        return verdict.cause

    def compare_replicas(self, record: StepRecord, light: LightStep, reading: Reading) -> Desync | None:
        """Compare replicated state, as it was read, over the ranks, bit by bit; collective."""
        return self._judge.replicas(record, light.l2, reading)

    def calibration_due(self, record: StepRecord) -> bool:
        """Tell whether this healthy step is to be replayed, to learn the spread; alone, also one of a kind that is new."""
        if not (self._config.replay.enabled and self._config.replay.calibrate):
            return False
        if any(v.cause not in NO_FAULT and v.action is not Action.HEALED for v in self.verdicts):
            return False  # what a convicted device computes says nothing of the model
        number = record.number  # how many were looked at before
        due = self._rechecks > 0 or number in _CALIBRATIONS or (number > 0 and number % _CALIBRATE_EVERY == 0)
        if self._ranks.size > 1:
            return due
        shape = record.shape
        return self._kinds.is_due(shape, known=self.experiments.agreed[shape] > 0) or due

    def calibrate(self, record: StepRecord, original: Fingerprint, light: LightStep) -> None:
        """Replay a step that nobody suspects; collective. A spread that only a few ranks show is questioned at once."""
        self._know_precision(record)
        with self._watchdog.over(record.step) if self.replayer.lockstep else nullcontext():
            problem = self.experiments.calibrate(record, original)
        self._rechecks -= self._rechecks > 0
        if problem is None:
            return
        if self.experiments.odd:
            site = light.site(0)
            finding = Finding("replay", site, Severity.WARNING, problem, {}, light.step, light.rank)
            self.question(record, original, [finding] if self.experiments.odd_here else [], light)
            return
        self._reporter.once(f"replay: {problem}")

    def _know_precision(self, record: StepRecord) -> None:
        if any(forward.autocast.enabled for forward in record.forwards):
            self.experiments.tolerance = NEAR["low"]

    # -- telling -------------------------------------------------------------------------------------------------

    def _suspicions(self, loud: list[Finding]) -> dict[str, Any]:
        """Return every rank's suspicions, short; collective."""
        mine = [{"sensor": f.sensor, "site": str(f.site), "message": f.message, **_numbers(f)} for f in loud[:3]]
        told = [json.loads(text) if text else [] for text in self._ranks.gather_text(json.dumps(mine, default=str))]
        return {f"rank {rank}": items for rank, items in enumerate(told) if items}

    def _announce(self, verdict: Verdict, loud: list[Finding], *, differs: bool) -> None:
        whose = self._ranks.in_job in verdict.ranks[:1] if verdict.ranks else self._ranks.rank == 0
        if verdict.cause in NO_FAULT or verdict.action is Action.REPORTED:
            self._no_fault_in_a_row += 1
            rest = min(_LONGEST_REST, 2 ** (self._no_fault_in_a_row - 2)) if self._no_fault_in_a_row > 1 else 0
            self._rests_until = self._root.record.number + (rest if loud else 0)
        else:
            self._no_fault_in_a_row = 0
        if verdict.cause is Cause.DISMISSED:
            self.dismissed += 1
            self._note("dismissed", verdict, speak=bool(loud))
            return
        if verdict.cause is Cause.INCONCLUSIVE and not differs:
            # Nothing speaks against anybody; the same reason is told once (once more for an exact sensor), and counted.
            self.left_open += 1
            reason = str(verdict.evidence.get("reason", "")), any(finding.sensor in _EXACT for finding in loud)
            self._note("inconclusive", verdict, speak=bool(loud) and reason not in self._said)
            self._said.add(reason)
            return
        if self._is_known(verdict):
            self.dismissed += 1
            self._note("still so", verdict, speak=False)
            return
        self.verdicts.append(verdict)
        self._reporter.verdict(verdict, speak=self._ranks.size == 1 or whose)

    def _is_known(self, verdict: Verdict) -> bool:
        """Tell whether state is found corrupt that was before, and was only reported: it stays so at every step."""
        if (verdict.cause, verdict.action) != (Cause.CORRUPT_STATE, Action.REPORTED):
            return False
        same = [v for v in self.verdicts if (v.cause, v.ranks) == (verdict.cause, verdict.ranks)]
        return any(str(v.site and v.site.short) == str(verdict.site and verdict.site.short) for v in same)

    def _note(self, what: str, verdict: Verdict, *, speak: bool) -> None:
        message = f"{what}: {verdict.message}"
        note = Note(message, verdict.step, self._ranks.in_job, "judge", evidence={"cause": what, **verdict.evidence})
        self._reporter.note(note, speak=speak)

    def _stop(self, verdict: Verdict, code: int) -> None:
        self._end(code, verdict.message, verdict.step)

    def _stop_unproven(self, loud: list[Finding], step: int) -> None:
        """End at an anomaly of level error, without proof, as the reference systems do; collective.

        What only statistics suspect (level warning) goes on to the experiments.
        """
        told = [text for text in self._ranks.gather_text(loud[0].message if loud else "") if text]
        if not told:
            return
        message = f"step {step}: stopped at an anomaly, unproven (act = stop): {told[0]}"
        self.stopped_at = message
        note = Note(message, step, self._ranks.rank, "judge", Severity.ERROR, evidence={"alert": alert_fields()})
        self._reporter.note(note, speak=bool(loud))
        self._end(EXIT_ELSEWHERE, message, step)

    def _end(self, code: int, message: str, step: int) -> NoReturn:
        """End together with the other ranks; one that is lost now changes nothing about why."""
        try:
            self._ranks.barrier(min(30.0, self._config.ranks.deadline_s))  # seconds; an end need not wait longer
        except SideChannelError as error:
            self._reporter.rank_lost(error, self._ranks, step)
        raise TrainingStopped(code, message)


def _numbers(finding: Finding) -> dict[str, Any]:
    return {key: value for key, value in finding.evidence.items() if isinstance(value, float | int | str)}
