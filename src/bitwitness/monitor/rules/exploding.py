"""One layer whose numbers grow at once, while the rest of its kind does not."""

from __future__ import annotations

import numpy as np

from bitwitness.monitor.movement import FLOORS
from bitwitness.monitor.rules.rule import Alert, Rule, View, named

_KINDS = tuple(kind for kind in FLOORS if kind != "comm")  # what a script sends is what it likes
_GROWTH = {"moment2": 25.0, "param": 2.0}
"""Times the usual that is an explosion: five, but for squares of gradients and for weights, which no step doubles."""
_FIVE = 5.0
_YOUNG = (
    64.0  # steps of a training in which sizes still find their place: the factor is larger by as much as it is younger
)


class Exploding(Rule):
    """Alerts where a size is beyond its history's threshold, and at least five times its usual; weights twice.

    In the first 64 steps more is asked for, by as much as the training is younger.
    Each alarm raises the threshold of its kind, and quiet steps lower it again (`History.caution`): so that there is one false
    alarm in some 1,700 steps of a kind at the most, however many series the kind has; set for kinds of ten series and more.
    Where most of a kind grows at once it is the loss, and ``spike``'s business.
    """

    name = "exploding"
    rate = 6e-5

    def look(self, view: View) -> list[Alert]:
        """Return the first series in causal order that explodes."""
        found: list[int] = []
        for kind in _KINDS:
            moved = view.moved.get(kind)
            if moved is None or not moved.places.size:
                continue
            growth = np.log(_GROWTH.get(kind, _FIVE) * np.maximum(1.0, _YOUNG / np.maximum(moved.seen, 1.0)))
            beyond = (moved.scores > moved.threshold) & (moved.gap > growth) & (moved.seen >= self._config.warmup)
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
