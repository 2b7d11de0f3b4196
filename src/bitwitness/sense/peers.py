"""A rank's local gradient, before reduction, against the other ranks' on the same parameter in the same step.

What is exchanged is one sum over the ranks of [5, P] numbers, whatever the number of ranks: a count, and the values and
squares of ln max|g| and ln L2. Each rank then leaves itself out and takes its distance from the mean of the others, which
has a history of its own (`history`): a rank's data may well differ a little from the rest's at every step. A faulty rank
stands far from its quiet peers; to them, the deviation of their peers (the faulty one among them) is large, so only the
faulty one suspects itself.
"""

from __future__ import annotations

import numpy as np

from bitwitness.capture.light import LightStep, Vector, log_sizes
from bitwitness.finding import Finding
from bitwitness.sense.selftest import NAMES, made_light, seen, self_test
from bitwitness.stats.history import History

FEATURES = ("ln max|g|", "ln L2(g)", "ln max|g| - ln L2(g)")
# Deviations of each feature below which nothing is told from chance, in natural logarithms: the largest element of a gradient
# varies by more than its norm does, from one batch to the next. The same floors as the trend's.
_FLOOR = (0.08, 0.05, 0.05)
# The same until there is a history, when the spread of a few ranks in one step is all that is known.
_EARLY_FLOOR = (0.3, 0.2, 0.3)
_NAMED = 3  # suspicions of one step: the strongest say where to look, more say the same
_EARLY = 8  # steps before the history's scores are used; it knows nothing sooner (`history`)


class PeersSensor:
    """Suspects this rank where its gradient is more than ``z`` deviations away from its peers'.

    Needs at least three ranks (two others); sees from the first step on, at first only what is far from the peers by their
    own spread. Blind to what a fault shared by all ranks does.
    """

    name = "peers"

    def __init__(self, parameters: int, *, z: float, warmup: int = 20) -> None:
        self.history = History(3 * parameters, warmup=warmup, z=z, floor=np.repeat(_FLOOR, parameters))
        self._latest: Vector | None = None

    def row(self, light: LightStep) -> Vector:
        """Return what this rank contributes to the sum, float64 [5 * P]: count, values and squares."""
        sizes = log_sizes(light)[:2]
        known = np.isfinite(sizes).all(axis=0)
        values = np.where(known, sizes, 0.0)
        return np.concatenate([known.astype(float)[None], values, values**2]).reshape(-1)

    def look(self, light: LightStep, total: Vector) -> list[Finding]:
        """Return suspicions, given the sum of all ranks' rows; at most three, the strongest first."""
        size = len(light.names)
        distance, spread = self._distance(light, total)
        others = total[:size] - self.row(light)[:size]  # how many other ranks have a value of each parameter
        self._latest = distance.reshape(-1)
        if self.history.steps < _EARLY:
            few = 1.0 + 2.0 / np.maximum(others - 1.0, 1.0)  # a deviation of two or three values is a poor guess
            score = distance / np.maximum(few * spread, np.array(_EARLY_FLOOR)[:, None])
            score[~np.isfinite(score)] = 0.0
        else:
            score = self.history.scores(self._latest, spread.reshape(-1)).reshape(3, size)
        strongest = np.abs(score).max(axis=0) if size else np.zeros(0)
        limit = self.history.threshold
        suspects = [int(i) for i in np.argsort(-strongest)[:_NAMED] if strongest[i] > limit]
        return [self._finding(light, i, score[:, i], distance[:, i], spread[:, i]) for i in suspects]

    def learn(self, *, false_alarm: bool = False) -> None:
        """Take the step looked at last, which was not proven wrong, in; ``false_alarm``: a rank suspected it."""
        if self._latest is not None:
            self.history.learn(self._latest, false_alarm=false_alarm)
        self._latest = None

    def _distance(self, light: LightStep, total: Vector) -> tuple[Vector, Vector]:
        """Return the distance from the others' mean and the others' own standard deviation, float64 [3, P] each."""
        size = len(light.names)
        own = self.row(light).reshape(5, size)
        others = total.reshape(5, size) - own
        count = np.maximum(others[0], 1.0)
        mean = others[1:3] / count
        variance = np.maximum(others[3:5] / count - mean**2, 0.0) * count / np.maximum(count - 1.0, 1.0)
        comparable = (own[0] > 0) & (others[0] >= 2)
        distance = np.where(comparable, own[1:3] - mean, np.nan)
        deviation = np.sqrt(variance)
        peaked = distance[0] - distance[1]
        # the difference of two sizes varies at most as much as both together
        return np.concatenate([distance, peaked[None]]), np.concatenate([deviation, deviation.sum(axis=0)[None]])

    def _finding(self, light: LightStep, index: int, score: Vector, distance: Vector, spread: Vector) -> Finding:
        feature = int(np.abs(score).argmax())
        message = (
            f"local gradient of {light.names[index]} on rank {light.rank}: {FEATURES[feature]} is "
            f"{score[feature]:+.1f} deviations from the other ranks'"
        )
        evidence = {
            "feature": FEATURES[feature],
            "z": float(score[feature]),
            "threshold": self.history.threshold,
            "distance": float(distance[feature]),
            "others_deviation": float(spread[feature]),
        }
        return light.finding(self.name, index, message, evidence)


@self_test("peers", "a local gradient against the other ranks' (three ranks or more)")
def _proof() -> str:
    sensor = PeersSensor(len(NAMES), z=9.0)
    clean = [made_light(0, rank) for rank in range(4)]
    faulty = [*clean[:-1], made_light(0, 3, spoiled=1e3)]
    return seen(
        sensor.look(clean[3], np.sum([sensor.row(light) for light in clean], axis=0)),
        sensor.look(faulty[3], np.sum([sensor.row(light) for light in faulty], axis=0)),
    )
