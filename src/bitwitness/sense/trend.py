"""A parameter's gradient against its own history.

For each parameter three numbers are followed: ln max|g|, ln L2 and their difference (how peaked the gradient is). What all of
them do together is taken away first (`history`) and followed as a number of its own, as is the loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwitness.capture.light import LightStep, Vector, log_sizes
from bitwitness.finding import Finding, Severity
from bitwitness.sense.selftest import NAMES, made_light, seen, self_test
from bitwitness.site import Site
from bitwitness.stats.history import History

FEATURES = ("ln max|g|", "ln L2(g)", "ln max|g| - ln L2(g)")
# Deviations of each feature below which nothing is told from chance, whatever the history says; in natural logarithms, so
# that with z = 9 a norm changes by half before it is suspected. The largest element varies more than the norm.
_FLOOR = (0.08, 0.05, 0.05)
_LOSS_FLOOR = 0.05  # the same of asinh of the loss: about 5 % of a loss that is not small
_LEVEL_FLOOR = (
    0.25  # with z = 9, all gradients grow tenfold before that alone is a suspicion: a bad batch may triple them
)
_NAMED = 3  # suspicions of one step: the strongest say where to look, more say the same


class TrendSensor:
    """Suspects a parameter whose gradient leaves its own history by more than ``z`` deviations.

    Sees single large values and blocks of wrong ones in any gradient, activation gradient or activation that reaches a
    parameter's gradient. Does not see faults smaller than the batch-to-batch noise, nor those that leave sizes as they are
    (a sign), nor any in the first 8 steps. Costs some vector operations on the host, [3 P].
    """

    name = "trend"

    def __init__(self, parameters: int, *, warmup: int, z: float) -> None:
        floor = np.append(np.repeat(_FLOOR, parameters), [_LOSS_FLOOR, _LEVEL_FLOOR])
        self.history = History(3 * parameters + 2, warmup=warmup, z=z, floor=floor)

    @property
    def ripe(self) -> bool:
        """Whether enough steps were learned to judge one by."""
        return self.history.ripe

    def look(self, light: LightStep) -> list[Finding]:
        """Return suspicions about this step, at most three, the strongest first; the history is not changed."""
        scores = self.history.scores(self._values(light))
        size = len(light.names)
        table = scores[: 3 * size].reshape(3, size)
        strongest = np.abs(table).max(axis=0) if size else np.zeros(0)
        limit = self.history.threshold
        found = [self._parameter(light, int(i), table) for i in np.argsort(-strongest)[:_NAMED] if strongest[i] > limit]
        found += self._vanished(light)
        # A drift only where nothing else is suspected: what stands out in one step moves the sums, too.
        found = found or self._drifted(light, scores)
        if abs(scores[-2]) > limit:
            message = f"the loss ({_loss(light):.6g}) is {scores[-2]:+.1f} deviations from its history"
            found.append(self._whole(light, message, "asinh loss", float(scores[-2]), -2))
        if abs(scores[-1]) > limit:
            message = f"all gradients together are {scores[-1]:+.1f} deviations from their usual size"
            found.append(self._whole(light, message, "level of all gradients", float(scores[-1]), -1))
        return found

    def learn(self, light: LightStep, *, false_alarm: bool = False) -> None:
        """Take this step, which was not proven wrong, in; ``false_alarm``: a rank suspected it."""
        self.history.learn(self._values(light), false_alarm=false_alarm)

    def _values(self, light: LightStep) -> Vector:
        """Return what is followed, float64 [3 P + 2]; NaN where there is nothing."""
        sizes, level = self.history.levelled(log_sizes(light))
        # asinh: a logarithm for large losses, and defined for those that cross zero
        return np.append(sizes.reshape(-1), [np.arcsinh(_loss(light)), level or np.nan])

    def _drifted(self, light: LightStep, scores: Vector) -> list[Finding]:
        """Suspect what is a little off, and stays so: a fault that persists."""
        drifts = self.history.drifts(scores)
        entry = int(np.abs(drifts).argmax())
        if not abs(drifts[entry]) > self.history.drift_threshold:
            return []
        size = len(light.names)
        if entry >= 3 * size:
            what = "the loss" if entry == 3 * size else "the size of all gradients"
            return [self._whole(light, f"{what} stays away from its history", "drift", float(drifts[entry]), entry)]
        feature, index = divmod(entry, size)
        message = f"gradient of {light.names[index]}: {FEATURES[feature]} stays away from its history"
        evidence = self._evidence(FEATURES[feature], float(scores[entry]), entry) | {"drift": float(drifts[entry])}
        return [light.finding(self.name, index, message, evidence)]

    def _vanished(self, light: LightStep) -> list[Finding]:
        """Suspect a gradient that is zero for the first time, in a model none of whose gradients ever was zero for a step."""
        size = len(light.names)
        steady = self.history.never_absent[:size]
        sometimes = self.history.sometimes_absent[:size]
        gone = np.flatnonzero(steady & (light.absmax == 0))
        if not gone.size or sometimes.any():
            return []
        message = f"gradient of {light.names[gone[0]]} (and {gone.size - 1} more) is zero, for the first time"
        return [light.finding(self.name, int(gone[0]), message, {"zero_gradients": int(gone.size)})]

    def _parameter(self, light: LightStep, index: int, table: Vector) -> Finding:
        feature = int(np.abs(table[:, index]).argmax())
        entry = feature * len(light.names) + index
        score = float(table[feature, index])
        message = f"gradient of {light.names[index]}: {FEATURES[feature]} is {score:+.1f} deviations from its history"
        return light.finding(self.name, index, message, self._evidence(FEATURES[feature], score, entry))

    def _whole(self, light: LightStep, message: str, feature: str, score: float, entry: int) -> Finding:
        site = Site(".", "loss", 0, "forward", "out0").at(rank=light.rank, step=light.step)
        evidence = self._evidence(feature, score, entry)
        return Finding(self.name, site, Severity.WARNING, message, evidence, light.step, light.rank)

    def _evidence(self, feature: str, score: float, entry: int) -> dict[str, Any]:
        return {
            "feature": feature,
            "z": score,
            "threshold": self.history.threshold,
            "history_mean": float(self.history.mean[entry]),
            "history_deviation": float(self.history.spread[entry]),
        }


def _loss(light: LightStep) -> float:
    return float(np.mean(light.losses)) if light.losses else float("nan")


@self_test("trend", "a gradient against its own history")
def _proof() -> str:
    sensor = TrendSensor(len(NAMES), warmup=20, z=9.0)
    for step in range(30):
        sensor.learn(made_light(step))
    return seen(sensor.look(made_light(30)), sensor.look(made_light(30, spoiled=1e3)))
