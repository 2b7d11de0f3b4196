"""A training whose gradients grow for good while its loss rises."""

from __future__ import annotations

from collections import deque

import numpy as np

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.rules.rule import Alert, Rule, View
from bitwitness.monitor.series import SeriesKey
from bitwitness.stats.middle import median

_LATELY, _GAP, _SPAN = 16, 32, 128
"""Steps whose median is the present; steps between them and what it was before; steps that are remembered."""
_GROWTH = 8.0  # times the norm of all gradients that it was
_RISE = 0.25  # of the loss, above the lowest that it was
_EVERY = 4  # steps between two looks: medians of 16 change slowly
_WELL = 0.5  # of both, below which it has come back


class Diverging(Rule):
    """Alerts where the median norm of all gradients is eight times what it was, and that of the loss a quarter higher.

    Gradients alone grow in healthy trainings, too, and so does the loss of one of two networks that work against each other.
    In 119 healthy trainings of 42 kinds the lesser of both never came beyond 0.6 of what is asked for (on a logarithmic scale).
    """

    name = "diverging"
    rate = 1e-6

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._norms: deque[float] = deque(maxlen=_SPAN)
        self._losses: deque[float] = deque(maxlen=_SPAN)
        self._told = False

    def look(self, view: View) -> list[Alert]:
        """Return that it diverges, once until it is well again."""
        loss, norm = (view.numbers.number("training", metric) for metric in ("loss", "grad_norm"))
        if not (np.isfinite(loss) and norm > 0 and np.isfinite(norm)):
            return []
        self._norms.append(norm)
        self._losses.append(loss)
        if len(self._norms) < _LATELY + 2 * _GAP or view.numbers.step % _EVERY:
            return []
        norms, losses = np.array(self._norms), np.array(self._losses)
        now, before = median(norms[-_LATELY:]), median(norms[:-_GAP])
        high = median(losses[-_LATELY:])
        windows = np.lib.stride_tricks.sliding_window_view(losses[:-_LATELY], _LATELY)[:: _LATELY // 2]
        low = float(np.median(windows, axis=1).min())
        rise = (high - low) / max(abs(low), 1e-12)
        share = min(np.log(now / before) / np.log(_GROWTH), rise / _RISE)
        told, self._told = self._told, share > (_WELL if self._told else 1.0)
        if told or not self._told:
            return []
        key = SeriesKey("training", ".", None, "grad_norm")
        text = (
            f"the training diverges: the norm of all gradients is {now / before:.3g} times what it was, and the loss rose from "
            f"{low:.4g} to {high:.4g}"
        )
        return [self.alert(key, text, grad_norm=now, grad_norm_before=before, loss=high, lowest_loss=low)]
