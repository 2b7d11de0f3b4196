"""What a script sets: a learning rate that leaps, a loss scale under which nothing is learned any more."""

from __future__ import annotations

from dataclasses import replace

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.finding import Severity
from bitwitness.monitor.rules.rule import Alert, Rule, View, named
from bitwitness.monitor.series import SeriesKey

_LEAP, _MEANT = 3.0, 12.0
"""Times the largest rate so far that no warm-up by steps and no restart reaches from one step to the next; and up to which a
script may mean it: some warm up at a tenth of the rate."""
_AT_ONCE = 8.0
"""Times the rate of the step before that counts, too, in a training that is no warm-up any more."""
_LEARNED, _SETTLED = 20, 64  # steps
_ZERO = 8  # steps without a rate: no schedule ends in as many
_SKIPPED = 16  # steps in a row
_SMALLEST = 1.0


class LearningRate(Rule):
    """Alerts where a learning rate leaps to more than twelve times the largest that it ever was; notes it from three times on.

    From three times on, too, where that is eight times the rate of the step before, after the first 64 steps; and where a rate
    that was there is zero for eight steps.

    Exact: warm-ups rise by small steps, or once by ten, and a restart ends where it was.
    """

    name = "learning_rate"
    rate = 0.0

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._most: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._last: dict[int, float] = {}
        self._zero: dict[int, int] = {}

    def look(self, view: View) -> list[Alert]:
        """Return the first group whose rate leaps."""
        found: list[Alert] = []
        for place in view.numbers.places("training", "lr"):
            rate = float(view.numbers.value[place])
            key = view.numbers.keys[place]
            which = "" if key.name == "0" else f" of group {key.name}"
            self._zero[place] = self._zero.get(place, 0) + 1 if rate == 0 else 0
            if self._zero[place] == _ZERO and self._last.get(place) and not found:
                rates = [float(view.numbers.value[p]) for p in view.numbers.places("training", "lr")]
                who = "its weights learn nothing any more" if max(rates) > 0 else "nothing is learned any more"
                text = f"the learning rate{which} has been 0 for {_ZERO} steps: {who}"
                found = [self.alert(key, text, rate=rate, largest_before=self._most[place])]
            if not rate > 0:
                continue
            most, seen = self._most.get(place, rate), self._steps.get(place, 0)
            at_once = seen >= _SETTLED and rate > _AT_ONCE * self._last.get(place, rate)
            self._most[place], self._steps[place], self._last[place] = max(most, rate), seen + 1, rate
            if seen >= _LEARNED and rate > _LEAP * most and not found:
                text = f"the learning rate{which} leaps to {rate:.3g}, {rate / most:.3g} times the largest before"
                severity = Severity.WARNING if rate > _MEANT * most or at_once else Severity.INFO
                found = [replace(self.alert(key, text, rate=rate, largest_before=most), severity=severity)]
        return found


class LossScale(Rule):
    """Alerts where a gradient scaler skips sixteen steps in a row, or its scale is below one, where float16 loses gradients.

    Exact: each skip halves the scale, so that the largest that is usual (2^16) is gone by then.
    """

    name = "loss_scale"
    rate = 0.0

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._skipped = 0
        self._told = False

    def look(self, view: View) -> list[Alert]:
        """Return that no step is made any more, or that the scale is too small; once until it is well again."""
        key = SeriesKey("training", ".", None, "loss_scale")
        scale = view.numbers.number(key.kind, "loss_scale")
        if not scale > 0:
            return []
        self._skipped = self._skipped + 1 if view.overflowed else 0
        small = scale < _SMALLEST
        if self._skipped < _SKIPPED and not small:
            self._told = False
            return []
        if self._told:
            return []
        self._told = True
        why = (
            f"gradients overflowed in the last {self._skipped} steps, all of which the scaler skips"
            if self._skipped >= _SKIPPED
            else "below 1 small gradients are zero in float16"
        )
        return [self.alert(key, f"{named(key)} is {scale:.3g}: {why}", scale=scale, skipped=self._skipped)]
