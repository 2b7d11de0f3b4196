"""One layer whose numbers grow at once, while the rest of its kind does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.movement import FLOORS, Moved
from bitwitness.monitor.rules.rule import Alert, Rule, View, named
from bitwitness.monitor.sheet import Numbers

_KINDS = tuple(kind for kind in FLOORS if kind != "comm")  # what a script sends is what it likes
_GROWTH = {"moment2": 25.0, "param": 2.0}
"""Times the usual that is an explosion: five, but for squares of gradients and for weights, which no step doubles."""
_FIVE = 5.0
_POWERS = {"moment1": 1.0, "moment2": 2.0, "param": 0.0}
"""Of their gradients, which moments are averages of. Weights are judged by themselves, unless their gradients are rounding
errors, of which Adam makes whole steps."""
_OF_GRADIENTS = ("grad", "grad_reduced")
_MEMORY = 32  # steps of gradients that moments are made of for the most part
_YOUNG = (
    64.0  # steps of a training in which sizes still find their place: the factor is larger by as much as it is younger
)


class Exploding(Rule):
    """Alerts where a size is beyond its history's threshold, and at least five times its usual; weights twice.

    In the first 64 steps more is asked for, by as much as the training is younger.
    Each alarm raises the threshold of its kind, and quiet steps lower it again (`History.caution`): so that there is one false
    alarm in some 1,700 steps of a kind at the most, however many series the kind has; set for kinds of ten series and more.
    Where most of a kind grows at once it is the loss, and ``spike``'s business. A moment's growth counts beyond that of its
    gradient in the last 32 steps.
    """

    name = "exploding"
    rate = 6e-5

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._gradients: deque[Mapping[str, Moved]] = deque(maxlen=_MEMORY)

    def look(self, view: View) -> list[Alert]:
        """Return the first series in causal order that explodes."""
        found: list[int] = []
        self._gradients.append({kind: view.moved[kind] for kind in _OF_GRADIENTS if kind in view.moved})
        for kind in _KINDS:
            moved = view.moved.get(kind)
            if moved is None or not moved.places.size:
                continue
            growth = np.log(_GROWTH.get(kind, _FIVE) * np.maximum(1.0, _YOUNG / np.maximum(moved.seen, 1.0)))
            beyond = (moved.scores > moved.threshold) & (moved.gap > growth) & (moved.seen >= self._config.warmup)
            if kind in _POWERS and beyond.any():
                beyond &= moved.gap - self._explained(view, kind, moved, beyond) > growth
            beyond &= ~view.losses[moved.places]
            known = np.isfinite(moved.sizes)
            if beyond.any() and (known.sum() < 4 or beyond.sum() <= 0.5 * known.sum()):
                found += moved.places[beyond].tolist()
        if not found:
            return []
        places = view.first(found)
        place = places[0]
        key = view.numbers.keys[place]
        moved = view.moved[key.kind]
        here = int(np.flatnonzero(moved.places == place)[0])
        factor = float(np.exp(moved.gap[here]))
        text = f"{named(key)} is {factor:.3g} times its usual size"
        return [
            self.alert(
                key,
                text,
                (view.numbers.keys[p] for p in places),
                factor=factor,
                z=float(moved.scores[here]),
                threshold=moved.threshold,
            )
        ]

    def _explained(self, view: View, kind: str, moved: Moved, asked: NDArray[np.bool_]) -> Numbers:
        """Return what of some moments' growth their gradients' explains; all of it where those are rounding errors."""
        explained = np.zeros(moved.places.size)
        keys = view.numbers.keys
        for number in np.flatnonzero(asked).tolist():
            name = keys[int(moved.places[number])].name
            wanted = [place for place, key in enumerate(keys) if key.name == name and key.kind in _OF_GRADIENTS]
            grown = [one.gap[np.isin(one.places, wanted)] for step in self._gradients for one in step.values()]
            known = np.concatenate([gap[np.isfinite(gap)] for gap in grown]) if grown else np.zeros(0)
            if wanted:
                explained[number] = _POWERS[kind] * max(0.0, float(known.max())) if known.size else np.inf
        return explained
