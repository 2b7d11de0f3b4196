"""How numbers that are seen at every step usually move, and how far from it a new step is.

Each of F numbers has a running mean and mean absolute deviation. What the numbers do *together* (a hard batch, a loss spike,
a new learning rate) is described by a few principal components of the recent past; what is left of a number after they are
taken away is far quieter than the number itself, and is what a score is made of. This is the squared-prediction-error
monitoring of process control (Jackson and Mudholkar, 1979), entry by entry and with clipped scores, so that one wrong entry
neither hides in the components nor bends them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

# How fast the history moves. These figures are not derived; bench/detection shows what they find and how often they alarm.
_MEMORY = 0.05  # weight of a new value: a mean over about 20 steps
# Values that a first estimate is the median of: up to three wrong ones among them do no harm. More would see later.
_FIRST = 8
# Steps from which the components are found: some five times the mean's memory. The Gram matrix that is decomposed is of this
# size, whatever the number of entries.
_WINDOW = 96
_EVERY = 8  # steps between two such searches, which cost more than all else here; a component needs as many steps
# Components that are taken away. Too few leave what all gradients do together in the score; too many explain a fault, too.
_COMPONENTS = 4

# Outliers. A fault shall neither poison the history nor hide in a component.
_WINSOR = 3.0  # a value moves the history by at most this many deviations
_CLIP = 4.0  # deviations beyond which an entry says no more about the components
_ALONE = 2.0  # deviations that an entry's own movement may take part with
# Turns a mean absolute deviation into a standard deviation: sqrt(pi / 2) for normal values.
_NORMAL = 1.25
# Turns a median absolute deviation into a mean one, for normal values: 0.798 sigma over 0.674 sigma.
_MEDIAN_TO_MEAN = 1.19

# How much a score counts, and the threshold that it is held against.
_STALE = 4.0  # steps of absence after which an entry's score has shrunk by the square root of two
_RIPE = (
    16.0  # values from which a score counts in full: a deviation that was learned from fewer is itself off by a fifth
)
_EARLY = 0.25  # what a score counts before the warm-up is over: the first steps move fast, all in one direction
_ALARM = 1.4  # a false alarm raises the threshold by this
_CALM = (
    0.9998  # and each quiet step lowers it again: one false alarm in ln 1.4 / 0.0002, some 1,700 steps, is put up with
)
_MOST = 4.0  # the threshold never rises beyond this many times z: it would be blind to all but the grossest faults

# Drifts: a cumulative sum (Page, 1954), for what is small and stays.
_SLACK = 1.5  # deviations that a step may be off without counting as a drift
_DRIFT_CLIP = 5.0  # deviations that one step counts at most, so that no single step is a drift
_DRIFT = 1.1  # a drift counts from this many z on: with z = 9 three steps at five deviations, 3 (5 - 1.5) > 9.9

_LONG = 3  # warm-ups, after which a first absence means something
_TOGETHER = 8  # entries whose median may stand for what all of them do: it takes four wrong ones to move it

_SAVED = ("_seen", "_missed", "_absences", "_mean", "_deviation", "_rest", "_rests", "_first", "_past", "_up", "_down")


def next_caution(caution: float, *, alarmed: bool) -> float:
    """Return by how much more than its threshold is asked of the next step, from what was asked of this one."""
    return min(_MOST, caution * _ALARM) if alarmed else max(1.0, caution * _CALM)


class History:
    """The usual movement of F numbers.

    Parameters
    ----------
    size
        F.
    warmup
        Values of an entry before it is scored in full. From the eighth on (or the ``warmup``-th, if that is
        earlier) its score counts a quarter.
    z
        Score from which a step is unusual. False alarms raise it for a while, up to fourfold.
    floor
        Smallest deviation that is told from chance, [F] or one number, in the numbers' own unit.

    """

    def __init__(self, size: int, *, warmup: int, z: float, floor: Vector | float) -> None:
        self._warmup = max(warmup, 1)
        self._judged_from = min(_FIRST, self._warmup)
        self._z = z
        self._floor = np.broadcast_to(np.asarray(floor, dtype=np.float64), (size,))
        self._seen = np.zeros(size)
        self._missed = np.zeros(size)
        self._absences = np.zeros(size)
        self._mean = np.zeros(size)
        self._deviation = np.zeros(size)
        self._rest = np.zeros(size)  # mean absolute deviation of what the components leave
        self._rests = np.zeros(size)
        self._first = np.full((self._judged_from, size), np.nan)
        self._past = np.zeros((0, size))
        self._up, self._down = np.zeros(size), np.zeros(size)
        self._components: Vector | None = None
        self._since = 0
        self.caution = 1.0

    @property
    def threshold(self) -> float:
        """Score beyond which a step is unusual now."""
        return self._z * self.caution

    def levelled(self, sizes: Vector) -> tuple[Vector, float]:
        """Return logarithms of sizes, [3, P], without what all of them do at once, and that: their common level.

        The entries of ``sizes`` are this history's first 3 P; the third row, a difference of sizes, has no level. A level needs
        `_TOGETHER` entries to stand for all: without a level the sizes are returned as they are, with 0. Where there usually
        are so many, but not now (an overflow left few gradients finite), nothing can be told of these: all is NaN.
        """
        count = sizes[:2].size
        flat = sizes[:2].reshape(-1)
        known = np.isfinite(flat)
        usual = self._seen[:count] >= self._judged_from
        ripe = known & usual
        counted = ripe if ripe.sum() >= _TOGETHER else known
        if counted.sum() < _TOGETHER:
            return (np.full_like(sizes, np.nan), np.nan) if usual.sum() >= _TOGETHER else (sizes, 0.0)
        level = float(np.median((flat - self._mean[:count])[counted]))
        return sizes - np.array([[level], [level], [0.0]]), level

    @property
    def steps(self) -> int:
        """Steps learned, of the entry that has been there most often."""
        return int(self._seen.max(initial=0.0))

    @property
    def seen(self) -> Vector:
        """Values learned of each entry, float64 [F]."""
        return self._seen

    @property
    def ripe(self) -> bool:
        """Whether any entry was there often enough to be judged."""
        return self.steps >= self._judged_from

    @property
    def never_absent(self) -> NDArray[np.bool_]:
        """Entries that have had a value at every step so far, long enough for that to mean something, bool [F]."""
        result: NDArray[np.bool_] = (self._absences == 0) & (self._seen >= _LONG * self._warmup)
        return result

    @property
    def sometimes_absent(self) -> NDArray[np.bool_]:
        """Entries that had a value at some steps and none at a later one, bool [F]."""
        result: NDArray[np.bool_] = self._absences > 0
        return result

    @property
    def mean(self) -> Vector:
        """Running means, float64 [F]."""
        return self._mean

    @property
    def spread(self) -> Vector:
        """Running standard deviations, float64 [F], never below the floor."""
        result: Vector = np.maximum(_NORMAL * self._deviation, self._floor)
        return result

    def scores(self, values: Vector, spread: Vector | None = None) -> Vector:
        """Return each entry's score, signed, float64 [F]; 0 where it is not known well enough, or not finite now.

        ``spread``: standard deviations known from elsewhere (of the other ranks, for one), where they are larger.
        """
        wide, rest = self.spread, self._rest_spread()
        if spread is not None:
            larger = np.maximum(spread / wide, 1.0)
            rest = rest * larger
        left, _, known = self._left_over(values, wide)
        return self._scored(left, known, rest)

    def _scored(self, left: Vector, known: NDArray[np.bool_], rest: Vector) -> Vector:
        # a deviation learned from a few values is no more than a guess, however short the warm-up was asked to be
        counts = np.where(self._seen >= self._warmup, np.minimum(1.0, self._seen / _RIPE), _EARLY) * known
        score: Vector = counts * left / (rest * np.sqrt(1.0 + self._missed / _STALE))
        return score

    def drifts(self, scores: Vector) -> Vector:
        """Return how far each entry has kept away from its usual place up to this step, signed, float64 [F].

        A cumulative sum (Page, 1954) of the scores beyond `_SLACK`: what persists shows though no single step does.
        """
        up, down = self._sums(scores)
        return np.where(up >= down, up, -down)

    @property
    def drift_threshold(self) -> float:
        """Sum beyond which an entry's drift is unusual now."""
        return _DRIFT * self._z * self.caution

    def _sums(self, scores: Vector) -> tuple[Vector, Vector]:
        clipped = np.clip(scores, -_DRIFT_CLIP, _DRIFT_CLIP)
        return np.maximum(self._up + clipped - _SLACK, 0.0), np.maximum(self._down - clipped - _SLACK, 0.0)

    def learn(self, values: Vector, *, false_alarm: bool = False) -> None:
        """Take a step's values in (NaN where there is none), of which is known whether they alarmed in vain."""
        self.caution = next_caution(self.caution, alarmed=false_alarm)
        wide = self.spread
        left, usual, scored = self._left_over(values, wide)
        self._up, self._down = self._sums(self._scored(left, scored, self._rest_spread()))
        if false_alarm:  # the new place is as good as the old
            self._up, self._down = np.zeros_like(self._up), np.zeros_like(self._down)
        known = np.isfinite(values)
        self._learn_rest(left, scored)
        gap = np.where(known, values - self._mean, 0.0)
        self._learn_mean(gap, known, wide)
        self._learn_first(values, known)
        self._missed = np.where(known, 0.0, self._missed + 1.0)
        self._absences += ~known & (self._seen > 0)
        self._learn_components(usual)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _rest_spread(self) -> Vector:
        # the floor of the whole, in deviations of the whole; there is no telling apart below it either
        result: Vector = np.maximum(_NORMAL * self._rest, self._floor / self.spread)
        return result

    def _left_over(self, values: Vector, wide: Vector) -> tuple[Vector, Vector, NDArray[np.bool_]]:
        """Return what the components do not explain, in deviations; the usual part; and which entries are known.

        The usual part is what the components explain and at most `_ALONE` deviations of each entry's own.
        """
        known = np.isfinite(values) & (self._seen >= self._judged_from)
        z = np.where(known, values - self._mean, 0.0) / wide
        if self._components is None:
            return z, np.clip(z, -_ALONE, _ALONE), known
        part = np.clip(z, -_CLIP, _CLIP)
        # a few rounds are enough: entries that do not fit are pulled to what the others predict of them
        for _ in range(3):
            explained = self._components @ (self._components.T @ part)
            part = explained + np.clip(z - explained, -_ALONE, _ALONE)
        left = z - self._components @ (self._components.T @ part)
        return np.where(known, left, 0.0), np.where(known, part, 0.0), known

    def _learn_rest(self, left: Vector, scored: NDArray[np.bool_]) -> None:
        weight = np.maximum(_MEMORY, 1.0 / (self._rests + 1.0))
        limit = np.where(self._rests < self._warmup / 2, _CLIP, _WINSOR * self._rest_spread())
        self._rest += np.where(scored, weight * (np.minimum(np.abs(left), limit) - self._rest), 0.0)
        self._rests += scored

    def _learn_mean(self, gap: Vector, known: NDArray[np.bool_], wide: Vector) -> None:
        weight = np.maximum(_MEMORY, 1.0 / (self._seen + 1.0)) * (known & (self._seen >= self._judged_from))
        step = np.clip(gap, -_WINSOR * wide, _WINSOR * wide)
        self._mean = self._mean + weight * step
        self._deviation = self._deviation + weight * (np.abs(step) - self._deviation)

    def _learn_first(self, values: Vector, known: NDArray[np.bool_]) -> None:
        """Keep an entry's first values; the last of them gives it a mean and a deviation."""
        new = np.flatnonzero(known & (self._seen < self._judged_from))
        self._first[self._seen[new].astype(int), new] = values[new]
        self._seen += known
        ready = new[self._seen[new] == self._judged_from]
        if ready.size:
            first = self._first[:, ready]
            self._mean[ready] = np.median(first, axis=0)
            self._deviation[ready] = _MEDIAN_TO_MEAN * np.median(np.abs(first - self._mean[ready]), axis=0)

    def _learn_components(self, row: Vector) -> None:
        self._past = np.concatenate([self._past[-_WINDOW + 1 :], row[None]])
        self._since += 1
        if self._since >= _EVERY and len(self._past) >= self._warmup:
            self._since = 0
            self._find_components()

    def _find_components(self) -> None:
        count = min(_COMPONENTS, len(self._past) // _EVERY)
        energy, directions = np.linalg.eigh(self._past @ self._past.T)
        kept = energy[-count:] > 1e-9  # a direction without energy is rounding, and would be divided by it
        scale = np.sqrt(energy[-count:][kept])
        self._components = (self._past.T @ directions[:, -count:][:, kept]) / scale if kept.any() else None

    # -- keeping -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything learned, as plain arrays and numbers."""
        return {name.strip("_"): getattr(self, name).copy() for name in _SAVED} | {"caution": self.caution}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave; of the same F.

        Raises
        ------
        ValueError
            If an array is missing or has another shape.

        """
        for name in _SAVED:
            value = np.asarray(state[name.strip("_")], dtype=np.float64)
            old = getattr(self, name)
            if value.shape[-1] != old.shape[-1] or value.ndim != old.ndim:
                raise ValueError(f"{name.strip('_')} has shape {list(value.shape)}, expected {list(old.shape)}")
            setattr(self, name, value.copy())
        self.caution = float(state["caution"])
        if len(self._past) >= self._warmup:
            self._find_components()
