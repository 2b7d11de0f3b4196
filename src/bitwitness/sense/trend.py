"""A parameter's gradient against its own history.

For each parameter three numbers are followed: ln max|g|, ln L2 and their difference (how peaked the gradient is). Each
has a running mean and a running mean absolute deviation. What all parameters do together (a loss spike, a new learning
rate) is removed by subtracting the parameters' median deviation from each one's.
"""

from __future__ import annotations

import numpy as np

from bitwitness.finding import Finding
from bitwitness.sense.light import LightStep, Vector, log_sizes

FEATURES = ("ln max|g|", "ln L2(g)", "ln max|g| - ln L2(g)")
_MEMORY = 0.05  # weight of a new value: a mean over about 20 steps
_FLOOR = (
    0.08,
    0.05,
    0.05,
)  # deviations below these are not told apart from chance, whatever the history says
_WINSOR = 3.0  # a value moves the history by at most this many deviations, so that a fault cannot poison it
_COMMON = 8  # parameters needed for a median to stand for "all of them"


class TrendSensor:
    """Suspects a parameter whose gradient leaves its own history by more than ``z`` deviations.

    Sees single large values and blocks of wrong ones in any gradient, activation gradient or activation that reaches a
    parameter's gradient. Does not see faults smaller than the batch-to-batch noise, nor any in the first ``warmup`` steps.
    Costs a few vector operations on the host, [3, P].
    """

    name = "trend"

    def __init__(self, parameters: int, *, warmup: int, z: float) -> None:
        self._warmup = warmup
        self._z = z
        self._seen = np.zeros((3, parameters))
        self._mean = np.zeros((3, parameters))
        self._deviation = np.zeros((3, parameters))

    def look(self, light: LightStep) -> list[Finding]:
        """Return suspicions about this step, at most three, the strongest first; the history is not changed."""
        score = self._scores(log_sizes(light))
        score[self._seen < self._warmup] = 0.0
        strongest = np.abs(score).max(axis=0)
        suspects = np.argsort(-strongest)[:3]
        return [self._finding(light, int(i), score[:, i]) for i in suspects if strongest[i] > self._z]

    def learn(self, light: LightStep) -> None:
        """Take this step into the history."""
        sizes = log_sizes(light)
        known = np.isfinite(sizes)
        first = known & (self._seen == 0)
        self._mean[first] = sizes[first]
        weight = np.maximum(_MEMORY, 1.0 / (self._seen + 1.0))
        gap = np.where(known, sizes - self._mean, 0.0)
        limit = np.where(self._seen < self._warmup / 2, np.inf, _WINSOR * self._spread())
        step = np.clip(gap, -limit, limit)
        self._mean += np.where(known, weight * step, 0.0)
        self._deviation += np.where(known, weight * (np.abs(step) - self._deviation), 0.0)
        self._seen += known

    def _spread(self) -> Vector:
        # 1.25 turns a mean absolute deviation into a standard deviation (normal values)
        spread: Vector = np.maximum(1.25 * self._deviation, np.array(_FLOOR)[:, None])
        return spread

    def _scores(self, sizes: Vector) -> Vector:
        gap = sizes - self._mean
        ripe = (self._seen >= self._warmup) & np.isfinite(gap)
        for row in range(2):  # the ratio has no common mode
            if ripe[row].sum() >= _COMMON:
                gap[row] -= np.median(gap[row][ripe[row]])
        return np.where(np.isfinite(gap), gap / self._spread(), 0.0)

    def _finding(self, light: LightStep, index: int, score: Vector) -> Finding:
        feature = int(np.abs(score).argmax())
        message = f"gradient of {light.names[index]}: {FEATURES[feature]} is {score[feature]:+.1f} deviations from its history"
        evidence = {
            "feature": FEATURES[feature],
            "z": float(score[feature]),
            "threshold": self._z,
            "history_mean": float(self._mean[feature, index]),
            "history_deviation": float(self._spread()[feature, index]),
        }
        return light.finding(self.name, index, message, evidence)
