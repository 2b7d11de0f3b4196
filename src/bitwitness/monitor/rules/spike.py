"""A loss, or a total gradient norm, that jumps up."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.rules.rule import Alert, Rule, View, named
from bitwitness.monitor.series import SeriesKey
from bitwitness.stats.history import next_caution
from bitwitness.stats.middle import median

_METRICS = ("loss", "grad_norm")
_LEAST = (0.1, 1.1)
"""Jumps of asinh of the loss, and of ln of the norm, below which nothing is a spike: 10 % of a loss, three times a norm."""
_USUAL = 9  # steps whose median is the usual: few, so that it does not lag behind a loss that falls
_SPAN = 128  # steps whose jumps are remembered
_LATELY, _ABOVE = 64, 0.25  # steps whose highest values a spike is above, by this share of the jump that makes one
_TIMES = (2.0, 3.0)  # the largest of them that a spike is: a norm moves more by itself, towards the end above all
_SHARE = 2.0 / 3.0  # of ``z`` that it is beyond the deviation from step to step
_YOUNG = 64  # steps of a training that has shown few jumps as yet: more is asked for, by as much as it is younger
_TO_SIGMA = 1.4826 / 2.0**0.5  # of a median absolute difference of two normal values


class _Jumps:
    """Follows one number: how far it jumps above the median of the last steps, and how far it did before."""

    def __init__(self, least: float, times: float, z: float) -> None:
        self._least, self._times, self._z = least, times, z
        self._values: deque[float] = deque(maxlen=_SPAN)
        self._jumps: deque[float] = deque(maxlen=_SPAN)
        self._lately: deque[float] = deque(maxlen=_LATELY)
        self.seen = 0

    @property
    def usual(self) -> float:
        """What it was lately."""
        return median(list(self._values)[-_USUAL:]) if self._values else float("nan")

    def jump(self, value: float) -> float:
        """Return how far a value is above the usual; 0 where that is not known."""
        gap = value - self.usual
        return float(gap) if np.isfinite(gap) else 0.0

    def limit(self) -> float:
        """Return the jump from which on it is a spike."""
        steps = np.abs(np.diff(self._values)) if len(self._values) > 1 else np.zeros(1)
        sigma = median(steps) * _TO_SIGMA
        limit = max(self._least, _SHARE * self._z * sigma, self._times * max(self._jumps, default=0.0))
        return limit * max(1.0, _YOUNG / max(self.seen, 1))

    def is_ordinary(self, value: float, limit: float) -> bool:
        """Tell whether a value is about one that was there lately: what is usual by the median is not all that is usual."""
        return bool(self._lately) and value < max(self._lately) + limit * _ABOVE

    def learn(self, value: float, limit: float) -> None:
        """Take a value in; of a spike no more than what is not one yet, so that the next is seen, too."""
        if np.isfinite(value):
            jump = self.jump(value)
            self._lately.append(value if jump < limit else self.usual)
            self._jumps.append(min(jump, limit))
            self._values.append(value)
            self.seen += 1


class Spike(Rule):
    """Alerts at a step whose loss or gradient norm jumps above the last ones; what led to it is another's question.

    The jump has to be twice as large as any in the last 128 steps (of the norm three times), which normal noise does not do
    and heavy tails seldom, and two thirds of ``z`` deviations of what changes from step to step; and it has to lead above the
    highest of the last 64 steps. Each alarm raises what is
    asked for by 1.4: one in some 1,700 steps of the two series at the most.
    """

    name = "spike"
    rate = 3e-4

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._jumps = [_Jumps(least, times, config.z) for least, times in zip(_LEAST, _TIMES, strict=True)]
        self._caution = 1.0

    def look(self, view: View) -> list[Alert]:
        """Return the spike, if there is one."""
        loss, norm = (view.numbers.number("training", metric) for metric in _METRICS)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = [float(np.arcsinh(loss)), float(np.log(norm))]
        limits = [self._caution * one.limit() for one in self._jumps]
        shares = [
            one.jump(value) / limit if one.seen >= self._config.warmup and not one.is_ordinary(value, limit) else 0.0
            for one, value, limit in zip(self._jumps, values, limits, strict=True)
        ]
        usual = [float(np.sinh(self._jumps[0].usual)), float(np.exp(self._jumps[1].usual))]
        index = int(np.argmax(shares))
        alarmed = shares[index] > 1
        for one, value, limit in zip(self._jumps, values, limits, strict=True):
            one.learn(value, limit)
        self._caution = next_caution(self._caution, alarmed=alarmed)
        if not alarmed:
            return []
        key = SeriesKey("training", ".", None, _METRICS[index])
        text = f"{named(key)} jumps to {(loss, norm)[index]:.4g}, from about {usual[index]:.4g}"
        evidence: dict[str, Any] = {"loss": loss, "grad_norm": norm, "times_threshold": shares[index]}
        return [self.alert(key, text, **evidence)]
