"""A step whose gradients are complete: what its findings call for, agreed with the other ranks, done, and learned from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bitwitness.finding import Finding
from bitwitness.guard.deepsteps import DeepSteps
from bitwitness.guard.edits import Edits
from bitwitness.guard.proceedings import Proceedings
from bitwitness.guard.sensors import STATISTICAL, Sensors
from bitwitness.judge.fingerprint import Fingerprint
from bitwitness.ranks import Ranks
from bitwitness.sense.light import LightStep
from bitwitness.sense.nonfinite import NonfiniteSensor
from bitwitness.stats import Features
from bitwitness.tap.capture import StepRecord
from bitwitness.tap.gradients import LocalGradients
from bitwitness.tap.root import RootTap


@dataclass(frozen=True)
class HeldStep:
    """Follows one root's steps up; the parts are the guard's."""

    root: RootTap
    gradients: LocalGradients
    sensors: Sensors
    proceedings: Proceedings
    deep: DeepSteps
    ranks: Ranks
    edits: Edits

    def look_again(self, record: StepRecord) -> None:
        """Execute a step with compiled code once more, where its operators can be seen."""
        if record.communicates:
            return  # all ranks would have to agree first
        with self._replaying():
            self.sensors.look_again(self.proceedings.replayer, record)

    def follow(
        self,
        record: StepRecord,
        features: Features,
        light: LightStep,
        findings: list[Finding],
        *,
        deep: bool,
        stepped_early: bool,
    ) -> bool:
        """Agree with the other ranks on what the findings call for, do it, and learn; return whether it was nothing."""
        flagged = self.proceedings.worth_asking(findings)
        statistical = any(finding.sensor in STATISTICAL for finding in flagged)
        hit = any(finding.sensor == NonfiniteSensor.name for finding in findings)
        blamed = any(finding.sensor == NonfiniteSensor.name for finding in flagged)  # a verdict will say who made it
        asked = (bool(flagged), statistical, hit, blamed, record.communicates)
        suspicious, by_history, hit, blamed, self.proceedings.replayer.shared = self._agree(light.step, *asked)
        calibrating = not suspicious and self.proceedings.calibration_due(light.step)
        if (suspicious or calibrating) and not stepped_early:
            self.edits.look_closely(record)
        if suspicious:
            self.deep.look_closely_after(light.step)
            with self._replaying():
                wrong = self.proceedings.question(record, self._original(record, features), findings, light)
            if wrong:
                self.sensors.ranges(light)
                return False  # numbers that were proven wrong teach the sensors nothing
        if hit and not blamed:
            with self._replaying():
                self.proceedings.tracing.hit(record, light)
        for finding in self.sensors.ranges(light) if deep else ():
            self.proceedings.tracing.tell(finding)
        if calibrating:
            with self._replaying():
                self.proceedings.calibrate(record, self._original(record, features), light)
        self._learn(light, false_alarm=by_history, hit=hit)
        return not suspicious and not hit and not calibrating

    def _learn(self, light: LightStep, *, false_alarm: bool, hit: bool) -> None:
        if not hit:
            self.proceedings.tracing.clean(light)
        self.sensors.learn(light, false_alarm=false_alarm)
        self.deep.useful = self.ranks.size > 1 or self.sensors.has_products
        self.sensors.look_at_one_product_in(self.deep.plan.one_in)

    def _original(self, record: StepRecord, features: Features) -> Fingerprint:
        """Return what the training itself computed, to be compared with replays."""
        outputs = [
            digest for group in record.passes() for forward in group.forwards for digest in forward.output_digests
        ]
        device = self.root.device
        hashes = torch.stack(outputs).to(device) if outputs else torch.zeros(0, dtype=torch.int64, device=device)
        return Fingerprint.from_features(self.gradients.with_hashes(features), hashes)

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        """Keep the taps from taking what a replay computes for what the training computed. All ranks are here."""
        self.root.paused = self.sensors.reference.collector.paused = True
        try:
            with self.ranks.together():
                yield
        finally:
            self.root.paused = self.sensors.reference.collector.paused = False

    def _agree(self, step: int, *here: bool) -> list[bool]:
        """Tell, of each of some statements, whether it holds on any rank; settle the plan. The one exchange of a light step."""
        flags = torch.tensor([float(flag) for flag in here])
        told = self.ranks.max(torch.cat([flags, self.deep.proposal(step)]))
        self.deep.agree(told[len(here) :])
        return [bool(flag) for flag in told[: len(here)].tolist()]
