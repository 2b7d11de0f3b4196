"""The reference systems' feature-value detection: V1, V2, V3 and the combined scheme, by their own formulas.

========  ====================================  ==========================================================
scheme    feature value                         of
========  ====================================  ==========================================================
V1        L2 norm                               norm layers' input gradients, embedding weights' gradients
V2        L2 norm                               the first weight's gradient, and what backward communicates
V3        (max absolute value) squared          every parameter's local gradient
combined  (max absolute value) squared          every k-th parameter's local gradient
========  ====================================  ==========================================================

Squares are rounded to float32, as the vendors compute them: a value above 1.8e19 squares to Inf, and so
strikes even while the average is still warming up. Taken in float64 it would be a finite square, and be
averaged in. Nothing is lost by it: the evidence holds the largest value itself.

Where the vendors' text leaves a case open: a jump relative to a history without spread (max = min) is no
jump; V3's average does not start from a zero, above which everything is; NaN and Inf are not taken into V1's
and V2's range nor into V3's average, which they would spoil for ever (in the vendors' systems the training
ends there); under a gradient scaler they are ordinary, and told at level info.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwitness.config import FeatureConfig
from bitwitness.finding import Finding, Severity
from bitwitness.sense.light import LightStep, Vector
from bitwitness.site import Site

V1_MINIMUM_STEPS = 7
V2_MINIMUM_STEPS = 100
BETA = 0.99
WARM_UP = 10
V3_UPPER = (1e6, 1e4)
_NAMED = 8  # findings of one scheme in one step; the first of them says how many there were

Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]


class Level(IntEnum):
    """The reference's two levels: 1 is an error, 2 a warning."""

    NORMAL = 0
    ERROR = 1
    WARNING = 2


# V1 and V2: the value itself, and its jump


@dataclass(slots=True)
class JumpHistory:
    """What V1 and V2 remember of one tap."""

    previous: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    count: int = 0

    def jump(self, value: float) -> float:
        """Return ``|value - previous| / (high - low)``, or 0 where the range is empty."""
        spread = self.high - self.low
        return abs(value - self.previous) / spread if spread > 0 else 0.0

    def learn(self, value: float) -> None:
        """Take a value into the history."""
        self.count += 1
        if math.isfinite(value):
            self.previous = value
            self.low = min(self.low, value)
            self.high = max(self.high, value)


@dataclass(frozen=True, slots=True)
class JumpRule:
    """Bounds on the value and on its jump, for level 1 and 2; jumps count after ``minimum_steps`` values."""

    minimum_steps: int
    upper: tuple[float, float]
    sigma: tuple[float, float]

    def level(self, value: float, history: JumpHistory) -> Level:
        """Judge a value against the history that does not hold it yet."""
        if not math.isfinite(value):
            return Level.ERROR
        jump = history.jump(value) if history.count >= self.minimum_steps else 0.0
        if value > self.upper[0] or jump > self.sigma[0]:
            return Level.ERROR
        if value > self.upper[1] or jump > self.sigma[1]:
            return Level.WARNING
        return Level.NORMAL


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

    def _finding(
        self, light: LightStep, site: Site, value: float, level: Level, history: JumpHistory
    ) -> Finding:
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


# V3 and the combined scheme: the value against the average


@dataclass(frozen=True, slots=True)
class Averages:
    """What V3 and the combined scheme remember of P parameters, [P] each.

    ``average`` and ``previous`` are of squares, float64; ``count`` counts the values seen, ``learned`` (the
    vendors' none_zero_count) those that went into the average.
    """

    average: Vector
    previous: Vector
    count: Counts
    learned: Counts

    @classmethod
    def none(cls, parameters: int) -> Averages:
        """Return the state before the first step."""
        none, nothing = np.zeros(parameters), np.zeros(parameters, dtype=np.int64)
        return cls(none, none, nothing, nothing)

    def after(self, value: Vector, learn: Mask) -> Averages:
        """Return the state after one more value of each; ``learn`` selects those that move the average."""
        moved = BETA * self.average + (1.0 - BETA) * np.where(learn, value, 0.0)
        return Averages(np.where(learn, moved, self.average), value, self.count + 1, self.learned + learn)

    @property
    def corrected(self) -> Vector:
        """The average over ``1 - 0.99^n``, n values having been learned: without the bias of its start."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.where(self.learned > 0, self.average / (1.0 - BETA**self.learned), self.average)


def squares(absmax: Vector) -> Vector:
    """Return the feature value (max absolute value) squared: rounded to float32, Inf where that overflows."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.square(absmax.astype(np.float32)).astype(np.float64)


def judge_combined(
    value: Vector, before: Averages, upper_thresh1: float, upper_thresh2: float
) -> tuple[Mask, Vector, Averages]:
    """Judge values, float64 [P], by the combined scheme; return strikes, thresholds T1, and the state after.

    With the average corrected for its start: T1 = average * upper_thresh1, T2 = average * upper_thresh2, from
    10 learned values on; before, T1 = T2 = value, so that only NaN and Inf strike. A strike is a value above
    T1 that also differs from the previous one by more than T1. Other values, if not 0 and not above T2, are
    learned.
    """
    ripe = (before.learned >= WARM_UP) & (before.average != 0)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and Inf are asked for by name
        first = np.where(ripe, before.corrected * upper_thresh1, value)
        second = np.where(ripe, before.corrected * upper_thresh2, value)
        strikes = ~np.isfinite(value) | ((value > first) & (np.abs(value - before.previous) > first))
        learn = ~strikes & (value != 0) & (value <= second)
        return strikes, first, before.after(value, learn)


def judge_v3(
    value: Vector, before: Averages, upper: tuple[float, float] = V3_UPPER
) -> tuple[Counts, Vector, Averages]:
    """Judge values, float64 [P], by V3; return the levels, the thresholds of level 1, and the state after.

    The average starts as the first value that is not 0, and is corrected as if it had started from zero.
    """
    finite = np.isfinite(value)
    start = finite & (before.average == 0)
    before = replace(before, average=np.where(start, value, before.average), learned=before.learned * ~start)
    with np.errstate(over="ignore", invalid="ignore"):
        first = before.corrected * upper[0]
        error = ~finite | (value > first)
        warning = ~error & (value > before.corrected * upper[1])
        after = before.after(value, finite & (before.average != 0))
    return np.where(error, Level.ERROR, np.where(warning, Level.WARNING, Level.NORMAL)), first, after


# The sensor


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
        """Whether V1 is on, and so needs `tap.norms.NormTap` and the values of `asd.watch_gradient`."""
        return "v1" in self._config.schemes

    def look(
        self, light: LightStep, sites: Sequence[Site] = (), values: Vector | None = None
    ) -> list[Finding]:
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
            values.append(float(np.sqrt(np.sum(np.square(light.l2)))))
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
        strikes, limit, self._combined = judge_combined(
            value, before, config.upper_thresh1, config.upper_thresh2
        )
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
    """Say that a parameter left its average; ``index``: its number among all, and among those sampled."""
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
