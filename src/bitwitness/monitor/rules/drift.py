"""A series that leaves its place slowly, and stays away."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

import numpy as np

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.finding import Severity
from bitwitness.monitor.movement import TOGETHER, Moved
from bitwitness.monitor.rules.rule import Alert, Rule, View, brothers, named
from bitwitness.monitor.sheet import Numbers
from bitwitness.stats.middle import grown, median

_KINDS = ("activation", "activation_grad", "grad", "grad_reduced", "param")
_SLOW_KINDS = ("grad", "grad_reduced", "param")  # what a branch of a residual network adds grows by itself
_NOTED = ("activation_grad", "grad", "grad_reduced")
"""Kinds of which it is only noted: gradients grow and shrink as a training goes on, one layer's before another's."""
_SPAN = 64  # steps over which what is slower than the history is looked for
_SHIFT = float(np.log(3.0))
_SPREADS = 12.0
_LEAST = float(np.log(1.5))  # what the cumulative sum's drift has to be off by
_YOUNG = 128  # steps of a training in which its sizes still find their place: a warm-up moves final norms by factors
_SMOOTH = 0.1
_GOES = 0.3  # of the threshold, from which on a series goes somewhere


class Drift(Rule):
    """Alerts where a size stays away from its history, or has moved by a factor of three in 64 steps and alone.

    The first by the cumulative sum (Page, 1954) of its robust deviations, of which each alarm raises the threshold as that
    of ``exploding``. The second against what the others of its kind have done meanwhile: twelve times their median shift.
    What all of a kind do together is taken away before. Of gradients it is a note, and no alert.
    """

    name = "drift"
    rate = 6e-5

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._past: dict[str, deque[Numbers]] = {}
        self._shifts: dict[str, Numbers] = {}
        self._told: dict[int, int] = {}

    def look(self, view: View) -> list[Alert]:
        """Return the series that is farthest beyond its threshold."""
        best: tuple[bool, float, str, int, float] | None = None
        others: list[int] = []
        for kind in _KINDS:
            moved = view.moved.get(kind)
            if moved is None or not moved.places.size:
                continue
            judged = (moved.seen >= max(_YOUNG, 2 * self._config.warmup)) & (np.abs(moved.gap) > _LEAST) & ~moved.few
            judged &= moved.gap * moved.drifts > 0  # else it is on its way back
            drifts = moved.drifts / moved.drift_threshold
            summed = _alone(view, moved, np.where(judged, drifts, 0.0), drifts)
            slow = kind in _SLOW_KINDS
            shifted = self._shifted(kind, moved, view.numbers.step) if slow else np.zeros_like(summed)
            # Biases are zero at first, and grow by factors; that weights shrink so fast is no training's, whichever do.
            rising = np.where(moved.seen >= _YOUNG, np.maximum(shifted, 0.0), 0.0) if kind == "param" else shifted
            alone = _alone(view, moved, rising, shifted)
            shifted = np.where(shifted < 0.0, shifted, alone) if kind == "param" else alone
            share = np.where(np.abs(summed) >= np.abs(shifted), summed, shifted)
            others += moved.places[np.abs(share) > 1].tolist()
            index = int(np.abs(share).argmax())
            ranked = kind not in _NOTED, abs(float(share[index]))
            if ranked[1] > 1 and (best is None or ranked > (best[0], abs(best[1]))):
                best = ranked[0], float(share[index]), kind, index, float(shifted[index])
        if best is None:
            return []
        alerts, share_, kind, index, shift = best
        place = int(view.moved[kind].places[index])
        self._told[place] = view.numbers.step
        way = "above" if share_ > 0 else "below"
        slowly = abs(shift) >= abs(share_)
        factor = float(np.exp(self._shifts[kind][index] if slowly else view.moved[kind].gap[index]))
        since = f"{factor:.3g} times what it was {_SPAN} steps ago" if slowly else f"{factor:.3g} times by now"
        text = f"{named(view.numbers.keys[place])} stays {way} its usual size ({since}), and others of its kind do not"
        evidence = {
            "drift": share_,
            "shift": shift,
            "threshold": 1.0,
            "factor": factor,
        }
        alert = self.alert(view.numbers.keys[place], text, (view.numbers.keys[p] for p in others), **evidence)
        return [alert if alerts else replace(alert, severity=Severity.INFO)]

    def _shifted(self, kind: str, moved: Moved, step: int) -> Numbers:
        """Return how far each has moved in some time, against the others, as a share of what is put up with."""
        past = self._past.setdefault(kind, deque(maxlen=_SPAN))
        latest = past[-1] if past else moved.sizes
        latest = grown(latest, moved.sizes.size, np.nan)
        smooth = np.where(np.isfinite(latest), latest + _SMOOTH * np.nan_to_num(moved.sizes - latest), moved.sizes)
        old = past[0] if len(past) == _SPAN else None
        past.append(smooth)
        if old is None or _YOUNG + self._config.warmup > moved.seen.max(initial=0.0):
            return np.zeros_like(smooth)
        shift = smooth - grown(old, smooth.size, np.nan)
        known = np.isfinite(shift) & np.isfinite(moved.sizes) & ~moved.few
        if known.sum() < 4:
            return np.zeros_like(smooth)
        shift = self._shifts[kind] = np.where(known, shift - median(shift[known]), 0.0)
        share: Numbers = shift / max(_SHIFT, _SPREADS * median(np.abs(shift[known])))
        for number, place in enumerate(moved.places.tolist()):
            if (
                step - self._told.get(place, -2 * _SPAN) < _SPAN
            ):  # it was told of, and what it moved from lies before that
                share[number] = 0.0
        return share


def _alone(view: View, moved: Moved, share: Numbers, going: Numbers) -> Numbers:
    """Return a share without what goes in company; nobody is asked where nothing is beyond its threshold, as in most steps."""
    if not (np.abs(share) > 1).any():
        return share
    return np.where(_in_company(view, moved, going), 0.0, share)


def _in_company(view: View, moved: Moved, share: Numbers) -> np.ndarray:
    """Return which go the way that most of their brothers go, or of their kind where that has few series.

    ``share``: how far each has gone, of what is put up with.
    """
    ways = np.where(np.abs(share) > _GOES, np.sign(share), 0.0)
    result = np.zeros(ways.size, dtype=bool)
    groups: dict[str, list[int]] = defaultdict(list)
    for number, place in enumerate(moved.places.tolist()):
        groups[brothers(view.numbers.keys[place].name)].append(number)
    known = np.flatnonzero(np.isfinite(moved.sizes) & ~moved.few)
    for members in (*groups.values(), *([known.tolist()] if known.size < TOGETHER else [])):
        for way in (1.0, -1.0):
            going = [number for number in members if ways[number] == way]
            if len(members) > 2 and len(going) > 0.5 * len(members):
                result[going] = True
    return result
