"""How the sizes of one kind's series move: against their own robust history, what all of them do together taken away."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwitness.monitor.series import StepNumbers
from bitwitness.monitor.sheet import Numbers
from bitwitness.stats.history import History
from bitwitness.stats.middle import median

FLOORS = {
    "activation": 0.05,
    "activation_grad": 0.08,
    "grad": 0.08,
    "comm": 0.08,
    "grad_reduced": 0.08,
    "param": 0.02,
    "moment1": 0.1,
    "moment2": 0.1,
    "update": 0.1,
}
"""Deviations of a natural logarithm below which nothing is told from chance, for each kind that is followed; in causal order:
of what goes wrong in a step, the first in this order is nearest to its origin."""
FAINT = 1e-5
"""Times the middle of a kind's sizes: what is and was below is the rounding of larger numbers, as gradients of a bias are
before a normalisation, or of a key's, and moves as chance will have it."""
_KINDS_OF_GRADIENTS = ("activation_grad", "grad", "comm", "grad_reduced", "update")
_FEW = 8
"""Elements below which a tensor's size says little: a bias of one element crosses zero now and then."""
TOGETHER = 8
"""Series whose median may stand for what all of them do."""


@dataclass(frozen=True)
class Moved:
    """One step of one kind.

    ``places`` in the step's numbers, and for each, [F]: ``sizes``, ln of the L2 norm or the ratio, without the level, NaN
    where it is zero or absent; ``gap``, how far that is from its mean; ``scores`` and ``drifts`` as `History` has them;
    ``seen``, values learned before; ``few``, whether it has few elements. ``level``: what all of them do together.
    """

    places: NDArray[np.int64]
    sizes: Numbers
    gap: Numbers
    scores: Numbers
    drifts: Numbers
    seen: Numbers
    few: NDArray[np.bool_]
    level: float
    threshold: float
    drift_threshold: float


class Movement:
    """Follows one kind's series.

    Parameters
    ----------
    kind
        Which.
    warmup, z
        As `History` has them.

    """

    def __init__(self, kind: str, *, warmup: int, z: float) -> None:
        self.kind = kind
        self._warmup = warmup
        self._z = z
        self._places: list[int] = []
        self._few: list[bool] = []
        self._history: History | None = None
        self._known = 0

    def look(self, numbers: StepNumbers) -> Moved:
        """Return how the step's sizes lie; the history is not changed."""
        history = self._grown(numbers)
        places = np.asarray(self._places, dtype=np.int64)
        sizes = _sizes(self.kind, numbers, places)
        gap = sizes - history.mean
        known = history.seen >= min(8, self._warmup)
        ripe = np.isfinite(gap) & known
        # By how many there are, and not by how many are not zero now: the level would come and go with one of them.
        level = median(gap[ripe]) if known.sum() >= TOGETHER and 2 * ripe.sum() > known.sum() else 0.0
        if self.kind in _KINDS_OF_GRADIENTS:
            sizes = np.where(_is_faint(sizes, history.mean), np.nan, sizes)
        sizes, gap = sizes - level, np.where(np.isfinite(sizes), gap - level, np.nan)
        scores = history.scores(sizes)
        return Moved(
            places,
            sizes,
            gap,
            scores,
            history.drifts(scores),
            history.seen.copy(),
            np.asarray(self._few, dtype=bool),
            level,
            history.threshold,
            history.drift_threshold,
        )

    def learn(self, moved: Moved, *, alarmed: bool) -> None:
        """Take a step in. One that alarmed raises the threshold for a while, which bounds how often there are alarms."""
        if self._history is not None:
            self._history.learn(moved.sizes, false_alarm=alarmed)

    def _grown(self, numbers: StepNumbers) -> History:
        added = [p for p in range(self._known, len(numbers.keys)) if numbers.keys[p].kind == self.kind]
        if added:
            elements = _elements(numbers)
            self._places += added
            self._few += [elements.get(numbers.keys[place].name, np.inf) < _FEW for place in added]
        self._known = len(numbers.keys)
        old, size = self._history, len(self._places)
        if old is None or old.mean.size != size:
            new = History(size, warmup=self._warmup, z=self._z, floor=FLOORS[self.kind])
            if old is not None:
                new.load(_widened(old, size))
            self._history = new
            return new
        return old


def _elements(numbers: StepNumbers) -> dict[str, float]:
    """Return how many elements the largest tensor of each name has, where that is known: an update's row has none itself."""
    found: dict[str, float] = {}
    for key, count in zip(numbers.keys, numbers.count.tolist(), strict=True):
        if count > 0:
            found[key.name] = max(found.get(key.name, 0.0), count)
    return found


def _is_faint(sizes: Numbers, usual: Numbers) -> NDArray[np.bool_]:
    """Return which are, and were, far below what is in the middle."""
    known = sizes[np.isfinite(sizes)]
    if known.size < TOGETHER:
        return np.zeros(sizes.shape, dtype=bool)
    largest: NDArray[np.bool_] = np.fmax(sizes, usual) < median(known) + np.log(FAINT)
    return largest


def _widened(history: History, size: int) -> dict[str, object]:
    """Return what a history has learned, with room for more series behind."""
    state = history.state()
    result: dict[str, object] = {"caution": state.pop("caution")}
    for name, value in state.items():
        more = [(0, 0)] * (value.ndim - 1) + [(0, size - value.shape[-1])]
        result[name] = np.pad(value, more, constant_values=np.nan if name == "first" else 0.0)
    return result


def _sizes(kind: str, numbers: StepNumbers, places: NDArray[np.int64]) -> Numbers:
    """Return logarithms of sizes, NaN where there is none."""
    found = numbers.value[places] if kind == "update" else numbers.l2[places]
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes: Numbers = np.log(found)
    sizes[~np.isfinite(sizes) | (numbers.nan[places] + numbers.inf[places] > 0)] = np.nan
    return sizes
