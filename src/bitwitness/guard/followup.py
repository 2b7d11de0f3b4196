"""A step that sensors have looked at: what its findings call for, agreed with the other ranks, done, and learned from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bitwitness.capture.light import LightStep
from bitwitness.capture.step import StepRecord
from bitwitness.finding import Cause, Finding
from bitwitness.guard.deepsteps import DeepSteps
from bitwitness.guard.investigation import NO_FAULT, Investigation
from bitwitness.guard.keptgradients import KeptGradients
from bitwitness.guard.sensors import STATISTICAL, Sensors
from bitwitness.judge.fingerprint import Fingerprint
from bitwitness.ranks import Ranks
from bitwitness.sense.nonfinite import NonfiniteSensor
from bitwitness.session.judging import CompleteStep
from bitwitness.session.reader import StepReader


@dataclass(frozen=True)
class FollowUp:
    """Follows one root's steps up; the parts are the guard's."""

    reader: StepReader
    sensors: Sensors
    investigation: Investigation
    deep: DeepSteps
    ranks: Ranks
    kept: KeptGradients

    def look_again(self, record: StepRecord) -> None:
        """Execute a step with compiled code once more, where its operators can be seen."""
        if record.communicates:
            return  # all ranks would have to agree first
        with self.ranks.together():
            self.sensors.operators.look_again(self.investigation.replayer, record)

    def follow(self, step: CompleteStep, light: LightStep, findings: list[Finding], *, deep: bool) -> bool:
        """Agree with the other ranks on what the findings call for, do it, and learn; return whether it was nothing."""
        record = step.record
        flagged = self.investigation.worth_asking(findings)
        statistical = any(finding.sensor in STATISTICAL for finding in flagged)
        hit = any(finding.sensor == NonfiniteSensor.name for finding in findings)
        blamed = any(finding.sensor == NonfiniteSensor.name for finding in flagged)  # a verdict will say who made it
        asked = (bool(flagged), statistical, hit, blamed, record.communicates)
        agreed = self.deep.agree(self.ranks, record.number, *asked)
        suspicious, by_history, hit, blamed, self.investigation.replayer.shared = agreed
        calibrating = not suspicious and self.investigation.calibration_due(record)
        if (suspicious or calibrating) and not (step.stepped_early or self.kept.lost_here):
            self.reader.edits.look_closely(record)
        if suspicious:
            self.deep.look_closely_after(record.number)
            with self.ranks.together():
                cause = self.investigation.question(record, self._original(step), findings, light)
            if cause not in NO_FAULT:
                self.sensors.operators.ranges(light)
                return False  # numbers that were proven wrong teach the sensors nothing
            self.sensors.exact.dismissed(findings)
            self.sensors.operators.dismissed(findings, proven=cause is Cause.DISMISSED)
        if hit and not blamed and not self._hit(step, light):
            return False
        for finding in self.sensors.operators.ranges(light) if deep else ():
            self.investigation.tracing.tell(finding)
        if calibrating:
            with self.ranks.together():
                self.investigation.calibrate(record, self._original(step), light)
        self._learn(light, false_alarm=by_history, hit=hit)
        return not suspicious and not hit and not calibrating

    def _hit(self, step: CompleteStep, light: LightStep) -> bool:
        """Have a step traced that is not finite; return whether its numbers are what the device makes of it."""
        with self.ranks.together():
            findings = self.investigation.tracing.hit(step.record, light)
            if findings is None:
                return True
            return self.investigation.question(step.record, self._original(step), findings, light) in NO_FAULT

    def _learn(self, light: LightStep, *, false_alarm: bool, hit: bool) -> None:
        if not hit:
            self.investigation.tracing.clean(light)
        self.sensors.learn(light, false_alarm=false_alarm)
        self.deep.useful = self.ranks.size > 1 or self.sensors.operators.has_products
        self.sensors.operators.look_at_one_product_in(self.deep.plan.one_in)

    def _original(self, step: CompleteStep) -> Fingerprint:
        """Return what the training itself computed, to be compared with replays."""
        outputs = [
            digest for group in step.record.passes() for forward in group.forwards for digest in forward.output_digests
        ]
        device = self.reader.root.device
        hashes = torch.stack(outputs).to(device) if outputs else torch.zeros(0, dtype=torch.int64, device=device)
        assert step.features is not None  # noqa: S101 - a step without is not looked at
        return Fingerprint.from_features(self.reader.gradients.with_hashes(step.features), hashes)
