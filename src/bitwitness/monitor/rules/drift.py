"""A series that leaves its place slowly, and stays away."""

from __future__ import annotations

import numpy as np

from bitwitness.monitor.rules.rule import Alert, Rule, View, named

_KINDS = ("activation", "activation_grad", "grad", "grad_reduced")


class Drift(Rule):
    """Alerts where the cumulative sum (Page, 1954) of a size's robust deviations passes its threshold.

    What all of a kind do together is taken away before. The threshold rises with each alarm as that of ``exploding``.
    """

    name = "drift"
    rate = 6e-5

    def look(self, view: View) -> list[Alert]:
        """Return the series that is farthest beyond its threshold."""
        best: tuple[float, str, int] | None = None
        others: list[int] = []
        for kind in _KINDS:
            moved = view.moved.get(kind)
            if moved is None or not moved.places.size:
                continue
            share = np.abs(moved.drifts) / moved.drift_threshold
            others += moved.places[share > 1].tolist()
            index = int(share.argmax())
            if share[index] > 1 and (best is None or share[index] > best[0]):
                best = float(share[index]), kind, index
        if best is None:
            return []
        _, kind, index = best
        moved = view.moved[kind]
        key = view.numbers.keys[int(moved.places[index])]
        way = "above" if moved.drifts[index] > 0 else "below"
        text = f"{named(key)} stays {way} its usual size: now {np.exp(moved.gap[index]):.3g} times it"
        evidence = {"drift": float(moved.drifts[index]), "threshold": moved.drift_threshold}
        return [self.alert(key, text, (view.numbers.keys[p] for p in others), **evidence)]
