"""The reference systems' feature-value detection: V1, V2, V3 and the combined scheme, by their own formulas.

========  ====================================  ==========================================================
scheme    feature value                         of
========  ====================================  ==========================================================
V1        L2 norm                               norm layers' input gradients, embedding weights' gradients
V2        L2 norm                               the first weight's gradient, and what backward communicates
V3        (max absolute value) squared          every parameter's local gradient
combined  (max absolute value) squared          every k-th parameter's local gradient
========  ====================================  ==========================================================

The formulas, and how cases that the vendors' text leaves open are settled, are in `feature_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwitness.capture.light import LightStep, Vector
from bitwitness.config import FeatureConfig
from bitwitness.finding import Finding, Severity
from bitwitness.sense.feature_rules import (
    V1_MINIMUM_STEPS,
    V2_MINIMUM_STEPS,
    Averages,
    JumpHistory,
    JumpRule,
    Level,
    judge_combined,
    judge_v3,
    squares,
)
from bitwitness.sense.selftest import NAMES, made_light, self_test
from bitwitness.site import Site

__all__ = ["V1_MINIMUM_STEPS", "FeatureSensor", "JumpRule", "JumpScheme", "tap_name"]

_NAMED = 8  # findings of one scheme in one step; each says how many there were


@dataclass(slots=True)
class JumpScheme:
    """V1 or V2 over any number of taps, each known by its site."""

    sensor: str
    rule: JumpRule
    history: dict[Site, JumpHistory] = field(default_factory=dict)

    def look(self, light: LightStep, sites: Sequence[Site], values: Vector) -> list[Finding]:
        """Judge one step's values, float64 [K], in order, and learn from them; a site may come repeatedly."""
        findings: list[Finding] = []
        for site, value in zip(sites, values.tolist(), strict=True):
            history = self.history.setdefault(site, JumpHistory())
            level = self.rule.level(value, history)
            if level is not Level.NORMAL and len(findings) < _NAMED:
                findings.append(self._finding(light, site, value, level, history))
            history.learn(value)
        return findings

    def _finding(self, light: LightStep, site: Site, value: float, level: Level, history: JumpHistory) -> Finding:
        jump = history.jump(value)
        evidence = {
            "name": tap_name(site),
            "value": value,
            "pre_value": history.previous,
            "min": history.low,
            "max": history.high,
            "count": history.count,
            "jump": jump,
            "upper_thresh": list(self.rule.upper),
            "sigma_thresh": list(self.rule.sigma),
        }
        what = f"L2 norm of the gradient of {tap_name(site)} is {value:g}"
        if history.count >= self.rule.minimum_steps and math.isfinite(value):
            what += f", a jump of {jump:g} times its range"
        return _finding(self.sensor, light, site, level=level, what=what, evidence=evidence)


class FeatureSensor:
    """Runs the schemes that are on, once a step.

    Parameters
    ----------
    config
        Which schemes, and their thresholds.
    names
        The P parameters, in the order of `LightStep`.
    first_weight
        V2's tap; the first of ``names`` by default.
    communicates
        Whether a backward reduces gradients over ranks: V2 then also looks at all local gradients as one,
        which is what a reduction in a single bucket is given.

    """

    name = "feature"

    def __init__(
        self,
        config: FeatureConfig,
        names: Sequence[str],
        *,
        first_weight: str | None = None,
        communicates: bool = False,
    ) -> None:
        self._config = config
        self._first = list(names).index(first_weight) if first_weight is not None else 0
        self._communicates = communicates
        self._sample = np.arange(0, len(names), config.grad_sample_interval)
        self._v3 = Averages.none(len(names))
        self._combined = Averages.none(len(self._sample))
        upper, sigma = config.upper_thresh, config.sigma_thresh
        self._v1 = JumpScheme("feature.v1", JumpRule(V1_MINIMUM_STEPS, upper, sigma))
        self._v2 = JumpScheme("feature.v2", JumpRule(V2_MINIMUM_STEPS, upper, sigma))

    @property
    def taps(self) -> bool:
        """Whether V1 is on, and so needs `capture.norms.NormTap` and the values of `ascend.watch_gradient`."""
        return "v1" in self._config.schemes

    def look(self, light: LightStep, sites: Sequence[Site] = (), values: Vector | None = None) -> list[Finding]:
        """Judge this step, and take it into the histories.

        Parameters
        ----------
        light
            Sizes of the local gradients.
        sites, values
            V1's taps and their L2 norms, float64 [K], divided by the loss scale.

        """
        findings: list[Finding] = []
        for scheme in self._config.schemes:
            if scheme == "v1":
                findings += self._v1.look(light, sites, np.zeros(0) if values is None else values)
            elif scheme == "v2":
                findings += self._look_v2(light)
            elif scheme == "v3":
                findings += self._look_v3(light)
            else:
                findings += self._look_combined(light)
        return findings

    def _look_v2(self, light: LightStep) -> list[Finding]:
        if not light.names:
            return []
        site = light.site(self._first)
        sites = [Site(site.module, site.op, site.call, site.phase, site.slot)]
        values = [light.l2[self._first]]
        if self._communicates:
            sites.append(Site(".", "all_reduce", 0, "comm", "in0"))
            with np.errstate(over="ignore"):
                values.append(float(np.linalg.norm(light.l2)))
        return self._v2.look(light, sites, np.array(values))

    def _look_v3(self, light: LightStep) -> list[Finding]:
        value, before = squares(light.absmax), self._v3
        levels, limit, self._v3 = judge_v3(value, before)
        found = np.flatnonzero(levels)
        return [
            _average_finding(
                "feature.v3",
                light,
                (i, i),
                value=value,
                before=before,
                limit=limit,
                level=Level(levels[i]),
                total=len(found),
            )
            for i in found[:_NAMED].tolist()
        ]

    def _look_combined(self, light: LightStep) -> list[Finding]:
        value, before, config = squares(light.absmax[self._sample]), self._combined, self._config
        strikes, limit, self._combined = judge_combined(value, before, config.upper_thresh1, config.upper_thresh2)
        found = np.flatnonzero(strikes)
        return [
            _average_finding(
                "feature.combined",
                light,
                (int(self._sample[i]), i),
                value=value,
                before=before,
                limit=limit,
                level=None,
                total=len(found),
            )
            for i in found[:_NAMED].tolist()
        ]


def tap_name(site: Site) -> str:
    """Return how log lines name a tap: a weight by its path, any other by its module and operator."""
    if site.phase == "grad":
        return site.op if site.module == "." else f"{site.module}.{site.op}"
    if site.module == ".":
        return f"{site.op}#{site.call}"
    return site.module


def _average_finding(
    sensor: str,
    light: LightStep,
    index: tuple[int, int],
    *,
    value: Vector,
    before: Averages,
    limit: Vector,
    level: Level | None,
    total: int,
) -> Finding:
    """Return the finding that a parameter left its average; ``index``: its number among all, and among those sampled."""
    parameter, i = index
    evidence: dict[str, Any] = {
        "name": light.names[parameter],
        "value": float(value[i]),
        "absmax": float(light.absmax[parameter]),
        "avg": float(before.average[i]),
        "pre_value": float(before.previous[i]),
        "count": int(before.count[i]),
        "none_zero_count": int(before.learned[i]),
        "threshold": float(limit[i]),
        "parameters_struck": total,
    }
    what = f"(max|g|)^2 of {light.names[parameter]} is {value[i]:g}, its average {before.average[i]:g}"
    return _finding(sensor, light, light.site(parameter), level=level, what=what, evidence=evidence)


def _finding(
    sensor: str, light: LightStep, site: Site, *, level: Level | None, what: str, evidence: dict[str, Any]
) -> Finding:
    """Return a suspicion; ``level`` is None for a strike, which the vendors log as a warning."""
    severity = Severity.ERROR if level is Level.ERROR else Severity.WARNING
    if level is not None:
        evidence["level"] = int(level)
    if light.scaled and not math.isfinite(evidence["value"]):
        severity, what = Severity.INFO, f"{what} (under a gradient scaler)"
    site = site.at(rank=light.rank, step=light.step)
    return Finding(sensor, site, severity, what, evidence, light.step, light.rank)


@self_test("feature", "the reference schemes V1, V2, V3, combined")
def _proof() -> str:
    sensor = FeatureSensor(FeatureConfig(schemes=("v2", "v3", "combined"), grad_sample_interval=1), NAMES)
    if any(sensor.look(made_light(step)) for step in range(20)):
        return "false alarm on clean numbers"
    fired = {finding.sensor for finding in sensor.look(made_light(20, spoiled=float("inf")))}
    return "" if {"feature.v3", "feature.combined"} <= fired else f"only {sorted(fired)} fired"
