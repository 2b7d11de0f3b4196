"""The reference systems' schemes under our roof: their sensors, their log lines, their strikes and checksum windows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch

from bitwitness.capture.light import LightStep
from bitwitness.capture.norms import NormTap, first_weight
from bitwitness.capture.root import RootTap
from bitwitness.config import Config
from bitwitness.finding import Finding, Severity
from bitwitness.judge.strikes import Strikes
from bitwitness.ranks import Ranks
from bitwitness.respond.reference_log import ReferenceLog
from bitwitness.sense.feature import V1_MINIMUM_STEPS, FeatureSensor, JumpRule, JumpScheme
from bitwitness.tap.collector import GradientCollector, collecting


class ReferenceSchemes:
    """Runs V1, V2, V3 and the combined scheme as configured, and custom taps always.

    Parameters
    ----------
    clock
        Returns seconds; times strikes and checksum windows.

    """

    def __init__(
        self, config: Config, root: RootTap, ranks: Ranks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        feature = config.feature
        names = tuple(root.parameters)
        self._ranks = ranks
        self._log = ReferenceLog(ranks.rank)
        self._log_values = feature.log_values
        self._strikes_num = config.strikes.strikes_num
        self._stack = ExitStack()
        self.collector = self._stack.enter_context(collecting(GradientCollector()))
        self.sensor = None
        if feature.schemes:
            self.sensor = FeatureSensor(
                feature, names, first_weight=first_weight(root.root), communicates=ranks.size > 1
            )
        taps = self.sensor is not None and self.sensor.taps
        self.norms = self._stack.enter_context(NormTap(root.root, self.collector)) if taps else None
        self._custom = JumpScheme(
            "feature.watch", JumpRule(V1_MINIMUM_STEPS, feature.upper_thresh, feature.sigma_thresh)
        )
        linked = feature.with_checksum and "combined" in feature.schemes
        self.strikes = Strikes(config.strikes, clock) if linked else None

    def close(self) -> None:
        """Remove every hook and patch."""
        self._stack.close()

    @property
    def checksum_on(self) -> bool:
        """Whether a checksum window is open, so that every step is deep."""
        return self.strikes is not None and self.strikes.checksum_on

    @property
    def uncovered(self) -> dict[str, str]:
        """Taps whose gradient cannot be read, and why."""
        return dict(self.collector.uncovered)

    def look(self, light: LightStep, scale: float) -> list[Finding]:
        """Judge this step's values and write the reference systems' lines about what is found."""
        sites, norms = self.collector.drain()
        values = norms.cpu().numpy().astype(np.float64) / scale
        if self._log_values:
            for name, value in zip(light.names, light.absmax.tolist(), strict=True):
                self._log.value(name, value)
        if self.sensor is None or not self.sensor.taps:
            findings = self._custom.look(light, sites, values)
            findings += [] if self.sensor is None else self.sensor.look(light)
        else:
            findings = self.sensor.look(light, sites, values)
        for finding in findings:
            self._write(finding)
        return findings

    def _write(self, finding: Finding) -> None:
        if finding.severity is Severity.INFO:
            return
        if finding.sensor == "feature.combined":
            self._log.strike(finding.evidence)
            if self.strikes is not None:
                self.strikes.anomaly()
        elif finding.severity is Severity.ERROR:
            self._log.abnormal(finding.evidence)
        else:
            self._log.suspicious(finding.evidence)

    def advance(self, checksum_findings: list[Finding]) -> None:
        """Move the strike rule on by one step, together with all ranks; collective where strikes open checksums."""
        rule = self.strikes
        if rule is None:
            return
        if checksum_findings and rule.checksum_on:
            if not rule.fired:
                self._log.matmul_error()
            rule.checksum_failed()
        here = rule.struck_out
        mine = torch.tensor([float(here), float(rule.window_ended), float(rule.fired)])
        struck, ended, fired = (bool(flag) for flag in self._ranks.max(mine).tolist())
        if struck and not rule.checksum_on:
            if here:
                self._log.strikes_out_here(self._strikes_num)
            self._log.strikes_out()
            rule.open_window()
            self._log.checksum_start()
        elif ended and rule.checksum_on:
            _, found = rule.close_window(fired)
            self._log.global_result(found)
