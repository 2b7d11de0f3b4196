"""A series that shows its first NaN or Inf."""

from __future__ import annotations

import numpy as np

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.rules.rule import OVERFLOWING, Alert, Rule, View, named

_MASKS = ("activation", "comm")
"""Where an infinity that was there from the first step on is meant: a mask."""


class Nonfinite(Rule):
    """Alerts at the step in which values turn NaN or Inf, once until all are finite again; the series go on.

    Exact: no chance is in it. An Inf that an activation had when it was first seen is a mask, and counts no more.
    """

    name = "nonfinite"
    rate = 0.0

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._known: set[int] = set()
        self._masked: set[int] = set()
        self._spreading = False

    def look(self, view: View) -> list[Alert]:
        """Return the first series in causal order that is not finite."""
        numbers = view.numbers
        bad = (np.nan_to_num(numbers.nan) > 0) | (np.nan_to_num(numbers.inf) > 0) | _bad_values(view)
        self._learn_masks(view, bad)
        for place in np.flatnonzero(bad):
            key = numbers.keys[place]
            masked = place in self._masked and not numbers.nan[place] > 0
            # the norm of gradients that overflowed is NaN; the loss itself is not NaN for that
            of_step = key.kind == "training" and (key.metric == "grad_norm" or np.isinf(numbers.value[place]))
            overflowed = key.kind in OVERFLOWING or of_step  # so does the scaled loss itself
            if masked or (numbers.scaled and overflowed and not view.was_used(key)):
                bad[place] = False
        spreading, self._spreading = self._spreading, bool(bad.any())
        if not bad.any() or spreading:
            return []
        places = _origins_first(view, view.first(np.flatnonzero(bad).tolist()))
        first = places[0]
        key = numbers.keys[first]
        nan, inf = (0 if np.isnan(x) else int(x) for x in (numbers.nan[first], numbers.inf[first]))
        what = (
            f"{nan} NaN and {inf} Inf of {int(numbers.count[first])} values" if nan + inf else f"{numbers.value[first]}"
        )
        return [self.alert(key, f"{named(key)}: {what}", (numbers.keys[p] for p in places), nan=nan, inf=inf)]

    def _learn_masks(self, view: View, bad: np.ndarray) -> None:
        for place in np.flatnonzero(~np.isnan(view.numbers.count)):
            if place not in self._known:
                self._known.add(int(place))
                if bad[place] and view.numbers.keys[place].kind in _MASKS and view.numbers.inf[place] > 0:
                    self._masked.add(int(place))


def _origins_first(view: View, places: list[int]) -> list[int]:
    """Return places with those in front that a module makes of finite values.

    A module that is called several times has one place in a step's order, its first call's.
    """
    keys = view.numbers.keys
    given = {keys[p].name for p in places if keys[p].kind == "activation" and (keys[p].slot or "").startswith("in")}
    if not places or keys[places[0]].kind != "activation" or keys[places[0]].name not in given - {"."}:
        return places
    around = {
        ".",
        *(name.rpartition(".")[0] for name in {key.name for key in keys if key.kind == "activation"}),
    }  # what is made in them is theirs
    origins = [
        p
        for p in places
        if keys[p].kind == "activation"
        and (keys[p].slot or "").startswith("out")
        and keys[p].name not in given | around
    ]
    return [*origins[:1], *(p for p in places if p not in origins[:1])]


def _bad_values(view: View) -> np.ndarray:
    """Return where a number that is there is not finite: a loss, a norm, an update. What is not there is NaN, too."""
    numbers = view.numbers
    there = np.zeros(len(numbers.keys), dtype=bool)
    there[numbers.order] = True
    metric = np.array([key.metric is not None for key in numbers.keys], dtype=bool)
    bad: np.ndarray = there & metric & ~np.isfinite(numbers.value)
    return bad
