"""A loss, or a total gradient norm, that jumps up."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.rules.rule import Alert, Rule, View, named
from bitwitness.monitor.series import SeriesKey
from bitwitness.stats.history import History

_FLOORS = (0.05, 0.15)
"""Deviations of asinh of the loss, and of ln of the norm, below which nothing is told from chance: with z = 9 the loss jumps by
half of itself, and the norm to nearly four times its usual, before that is a spike."""
_METRICS = ("loss", "grad_norm")


class Spike(Rule):
    """Alerts at a step whose loss or gradient norm is far above its own history; what led to it is another's question.

    Each alarm raises the threshold as that of ``exploding``: one in some 1,700 steps of the two series at the most.
    """

    name = "spike"
    rate = 3e-4

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._history = History(2, warmup=config.warmup, z=config.z, floor=np.array(_FLOORS))

    def look(self, view: View) -> list[Alert]:
        """Return the spike, if there is one."""
        loss, norm = (view.numbers.number("training", metric) for metric in _METRICS)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.array([np.arcsinh(loss), np.log(norm)])
        values[~np.isfinite(values)] = np.nan
        gap = values - self._history.mean
        # not History's own scores: they take components away, and of two numbers the components are the numbers
        counts = np.where(self._history.seen >= self._config.warmup, 1.0, 0.0)
        scores = np.nan_to_num(counts * gap / self._history.spread)
        threshold = self._history.threshold
        index = int(scores.argmax())
        alarmed = bool(scores[index] > threshold)
        self._history.learn(values, false_alarm=alarmed)
        if not alarmed:
            return []
        key = SeriesKey("training", ".", None, _METRICS[index])
        usual = float(np.sinh(self._history.mean[0]) if index == 0 else np.exp(self._history.mean[1]))
        text = f"{named(key)} jumps to {(loss, norm)[index]:.4g}, from about {usual:.4g}"
        evidence: dict[str, Any] = {"loss": loss, "grad_norm": norm, "z": float(scores[index]), "threshold": threshold}
        return [self.alert(key, text, **evidence)]
