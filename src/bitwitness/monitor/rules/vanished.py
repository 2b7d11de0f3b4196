"""A series that drops to zero, or by orders of magnitude, while others of its kind do not."""

from __future__ import annotations

import numpy as np

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.rules.rule import Alert, Rule, View, brothers, named
from bitwitness.monitor.series import StepNumbers

_RIPE = 16  # steps in which a series was never zero, before a zero means something
_FALL = float(np.log(1000.0))  # of what is not zero
_KINDS = ("activation", "activation_grad", "grad", "comm", "grad_reduced", "update")
_AT_REST = 1e-3  # times the largest learning rate


class Vanished(Rule):
    """Alerts where a size that never was zero is zero, or a thousandth of its usual.

    Not where its brothers (the same name but for numbers: a mixture's experts) were ever absent or zero, since there that is
    ordinary; nor where most of a kind vanishes at once with the loss, whose doing it is.
    Set for: a fall by more than ln 1000 that is also beyond the history's threshold, which chance has not been seen to do.
    """

    name = "vanished"
    rate = 1e-7

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._gone: dict[str, set[int]] = {}
        self._ordinary: set[str] = set()
        self._loss = float("nan")
        self._rate = 0.0

    def look(self, view: View) -> list[Alert]:
        """Return the first series in causal order that vanished."""
        numbers, gone = view.numbers, list[int]()
        if self._is_clipped_away(numbers):
            return []
        rested = self._is_at_rest(numbers)
        for kind in _KINDS:
            moved = view.moved.get(kind)
            if moved is None or not moved.places.size or (kind == "update" and rested):
                continue
            sizes = (numbers.value if kind == "update" else numbers.l2)[moved.places]
            zero = (sizes == 0) & ~self._is_bad(numbers, moved.places)  # the size of NaN alone is no size
            fallen = (moved.gap < -_FALL) & (moved.scores < -moved.threshold)
            # what left no number at all (no gradient) is as good as zero, and so is what is NaN: not here
            absent = np.isnan(sizes)
            ripe = (moved.seen >= _RIPE) & ~moved.few
            before = self._gone.setdefault(kind, set())
            here = {int(p) for p in moved.places[ripe & (zero | fallen)]}
            self._note(view, moved.places, zero | absent, moved.seen)
            new = [p for p in here - before if brothers(numbers.keys[p].name) not in self._ordinary]
            returned = before - here  # what goes to zero and comes back does so as a matter of course
            self._ordinary.update(brothers(numbers.keys[p].name) for p in returned)
            before.clear()
            before |= here
            if 2 * len(new) <= max(int(ripe.sum()), 2) or self._loss_stays(view):
                gone += new
        self._loss = numbers.number("training", "loss")
        if not gone:
            return []
        places = view.first(gone)
        key = numbers.keys[places[0]]
        size = float((numbers.value if key.kind == "update" else numbers.l2)[places[0]])
        text = f"{named(key)} is {'zero' if size == 0 else f'{size:.3g}, a thousandth of its usual size'}, for the first time"
        return [self.alert(key, text, (numbers.keys[p] for p in places), l2=size)]

    def _is_at_rest(self, numbers: StepNumbers) -> bool:
        """Tell whether a schedule has brought the learning rates so low that updates are lost in the weights' rounding."""
        rates = [numbers.value[i] for i, key in enumerate(numbers.keys) if key.metric == "lr"]
        rate = float(np.nanmax(rates)) if np.isfinite(rates).any() else float("nan")
        self._rate = max(self._rate, float(np.nan_to_num(rate)))
        return rate < _AT_REST * self._rate

    @staticmethod
    def _is_clipped_away(numbers: StepNumbers) -> bool:
        """Tell whether some gradient holds an Inf: clipping by a norm that is infinite makes zeros of all the others."""
        infinite = np.flatnonzero(np.nan_to_num(numbers.inf) > 0)
        norm = numbers.number("training", "grad_norm")
        return bool(np.isinf(norm)) or any(numbers.keys[i].kind in ("grad", "grad_reduced") for i in infinite)

    @staticmethod
    def _is_bad(numbers: StepNumbers, places: np.ndarray) -> np.ndarray:
        """Return which hold NaN or Inf: what is finite among these may be nothing."""
        bad: np.ndarray = (numbers.nan[places] > 0) | (numbers.inf[places] > 0)
        return bad

    def _loss_stays(self, view: View) -> bool:
        """Tell whether the step's loss is about what it was: that all gradients vanish is not its doing then."""
        loss, before = view.numbers.number("training", "loss"), self._loss
        return bool(np.isfinite(loss) and np.isfinite(before) and abs(loss) > 0.1 * abs(before) > 0)

    def _note(self, view: View, places: np.ndarray, none: np.ndarray, seen: np.ndarray) -> None:
        """Learn whose absence is ordinary: of those that were away and not only just now vanished."""
        for place in places[none & (seen > 0) & (seen < _RIPE)]:
            self._ordinary.add(brothers(view.numbers.keys[int(place)].name))
