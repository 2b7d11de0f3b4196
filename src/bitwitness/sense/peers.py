"""A rank's local gradient, before reduction, against the other ranks' on the same parameter in the same step.

What is exchanged is one sum over the ranks of [5, P] numbers, whatever the number of ranks: a count, and the values and
squares of ln max|g| and ln L2. Each rank then leaves itself out and compares itself with the mean and the deviation of the
others. A faulty rank stands far from its quiet peers; to them, the deviation of their peers (the faulty one among them) is
large, so only the faulty one suspects itself.
"""

from __future__ import annotations

import numpy as np

from bitwitness.finding import Finding
from bitwitness.sense.light import LightStep, Vector, log_sizes

FEATURES = ("ln max|g|", "ln L2(g)")
_FLOOR = (0.12, 0.08)
_MEMORY = 0.05
_ABSENT = 0.0


class PeersSensor:
    """Suspects this rank where its gradient is more than ``z`` deviations away from its peers'.

    Needs at least three ranks (two others); sees from the first step on. Blind to what a fault shared by all ranks does.
    """

    name = "peers"

    def __init__(self, parameters: int, *, z: float) -> None:
        self._z = z
        self._usual = np.zeros((2, parameters))
        self._seen = 0

    def row(self, light: LightStep) -> Vector:
        """Return what this rank contributes to the sum, float64 [5 * P]: count, values and squares."""
        sizes = log_sizes(light)[:2]
        known = np.isfinite(sizes).all(axis=0)
        values = np.where(known, sizes, _ABSENT)
        return np.concatenate([known.astype(float)[None], values, values**2]).reshape(-1)

    def look(self, light: LightStep, total: Vector) -> list[Finding]:
        """Return suspicions, given the sum of all ranks' rows; at most three, the strongest first."""
        size = len(light.names)
        own = self.row(light).reshape(5, size)
        others = total.reshape(5, size) - own
        count = np.maximum(others[0], 1.0)
        mean = others[1:3] / count
        variance = np.maximum(others[3:5] / count - mean**2, 0.0) * count / np.maximum(count - 1.0, 1.0)
        comparable = (own[0] > 0) & (others[0] >= 2)
        # Few peers estimate their own spread badly, so the usual spread of this parameter over the ranks joins in.
        spread = np.maximum(np.sqrt(np.maximum(variance, self._usual**2)), np.array(_FLOOR)[:, None])
        score = np.where(comparable, (own[1:3] - mean) / spread, 0.0)
        self._learn(variance, comparable)
        strongest = np.abs(score).max(axis=0)
        suspects = np.argsort(-strongest)[:3]
        return [
            self._finding(light, int(i), score[:, i], mean[:, i], spread[:, i])
            for i in suspects
            if strongest[i] > self._z
        ]

    def _learn(self, variance: Vector, comparable: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
        self._seen += 1
        weight = max(_MEMORY, 1.0 / self._seen)
        spread = np.sqrt(variance)
        limit = 3.0 * np.maximum(self._usual, np.array(_FLOOR)[:, None])
        self._usual += np.where(comparable, weight * (np.minimum(spread, limit) - self._usual), 0.0)

    def _finding(self, light: LightStep, index: int, score: Vector, mean: Vector, spread: Vector) -> Finding:
        feature = int(np.abs(score).argmax())
        message = (
            f"local gradient of {light.names[index]} on rank {light.rank}: {FEATURES[feature]} is "
            f"{score[feature]:+.1f} deviations from the other ranks'"
        )
        evidence = {
            "feature": FEATURES[feature],
            "z": float(score[feature]),
            "threshold": self._z,
            "others_mean": float(mean[feature]),
            "others_deviation": float(spread[feature]),
        }
        return light.finding(self.name, index, message, evidence)
