"""Weights or activations that no longer change while others do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.finding import Severity
from bitwitness.monitor.movement import FAINT
from bitwitness.monitor.rules.rule import Alert, Rule, View, named
from bitwitness.stats.middle import grown, median

_KINDS = ("param", "activation")
_LEARNED = 8  # steps of which it is known whether a series moved
_LEAST = 3  # steps at rest
_FORGOTTEN = 32  # steps in which weights never moved while gradients reached them


class Frozen(Rule):
    """Alerts where a series' statistics keep their very bits for longer than its own past explains.

    A series that moved in m of n steps rests by chance for k steps with a probability of about (1 - m/n)^k; from 1e-6 on it
    is frozen. Only while at least half of its kind moves, and not weights without a gradient, which no optimizer moves.
    Weights that a gradient reaches and that have never moved were forgotten, or their updates are lost in rounding.
    """

    name = "frozen"
    rate = 1e-6

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._before: np.ndarray | None = None
        self._moved = np.zeros(0)
        self._steps = np.zeros(0)
        self._rest = np.zeros(0)
        self._told: set[int] = set()
        self._given: dict[str, list[int]] = {}

    def look(self, view: View) -> list[Alert]:
        """Return the first series in causal order that is frozen."""
        numbers = view.numbers
        more = len(numbers.keys) - self._moved.size
        for place, key in enumerate(numbers.keys[len(numbers.keys) - more :], len(numbers.keys) - more):
            if key.kind == "activation" and (key.slot or "").startswith("in"):
                self._given.setdefault(key.name, []).append(place)
        for name in ("_moved", "_steps", "_rest") if more else ():
            setattr(self, name, grown(getattr(self, name), len(numbers.keys)))
        now = np.stack([numbers.low, numbers.high, numbers.mean, numbers.l2])
        before, self._before = self._before, now
        if before is None:
            return []
        before = grown(before, len(numbers.keys), np.nan)
        comparable = np.isfinite(now).all(0) & np.isfinite(before).all(0)
        same = comparable & (now == before).all(0)
        found: list[int] = []
        idle = self._without_gradient(view)
        for kind in _KINDS:
            places = np.array(numbers.places(kind), dtype=np.int64)
            places = places[comparable[places]] if places.size else places
            if not places.size or same[places].mean() > 0.5:
                continue  # nothing moves: no step was made, or it is the same batch again
            self._learn(places, same)
            resting = [int(p) for p in places if self._is_frozen(int(p), kind) and int(p) not in idle]
            resting = [p for p in resting if not self._is_of_constants(view, p)]
            found += [p for p in resting if p not in self._told]
            self._told.update(resting)
            self._told -= {int(p) for p in places[~same[places]]}
        if not found:
            return []
        places_ = view.first(found)
        key = numbers.keys[places_[0]]
        steps = int(self._rest[places_[0]])
        text = f"{named(key)}: unchanged for {steps} steps, while others change"
        held = not self._moved[places_[0]] and key.name in view.updated
        if not self._moved[places_[0]]:
            why = "its updates are lost in rounding, or zero" if held else "no optimizer holds it"
            text = (
                f"{named(key)}: unchanged since the first step, {steps} steps ago, though a gradient reaches it: {why}"
            )
        alert = self.alert(key, text, (numbers.keys[p] for p in places_), steps=steps)
        return [replace(alert, severity=Severity.INFO) if held else alert]

    def _learn(self, places: np.ndarray, same: np.ndarray) -> None:
        still = same[places]
        self._rest[places] = np.where(still, self._rest[places] + 1, 0)
        # what it does while it may be frozen is not what it usually does
        usual = places[self._rest[places] < _LEAST]
        self._steps[usual] += 1
        self._moved[usual] += ~same[usual]

    def _is_frozen(self, place: int, kind: str) -> bool:
        steps, moved, rest = self._steps[place], self._moved[place], self._rest[place]
        if not moved and kind == "param":
            return bool(rest >= _FORGOTTEN)
        if steps < _LEARNED or rest < _LEAST or not moved:
            return False
        return bool(rest * np.log((steps - moved + 1) / (steps + 1)) < np.log(self.rate))

    def _is_of_constants(self, view: View, place: int) -> bool:
        """Tell whether a module returns something, and was given the same at all steps: its weights tell of it themselves."""
        key = view.numbers.keys[place]
        if key.kind != "activation" or not (key.slot or "").startswith("out"):
            return False
        given = self._given.get(key.name, [])
        return bool(given) and not self._moved[given].any()

    @staticmethod
    def _without_gradient(view: View) -> set[int]:
        """Return weights whose gradient is not there, or as good as zero, as far as gradients are looked at."""
        numbers = view.numbers
        sizes: dict[str, float] = {}
        known = np.nan_to_num(numbers.l2)
        for place, key in enumerate(numbers.keys):
            if key.kind in ("grad", "grad_reduced"):  # an optimizer that forgot a parameter reads its gradient no more
                sizes[key.name] = max(sizes.get(key.name, 0.0), float(known[place]))
        usual = median([size for size in sizes.values() if size > 0] or [0.0])
        return {
            i
            for i, key in enumerate(numbers.keys)
            if key.kind == "param" and sizes and not sizes.get(key.name, 0.0) > FAINT * usual
        }
