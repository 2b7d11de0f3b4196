"""What modules compute, and the gradients that come back to it, against their own history.

For each module that is looked at five numbers are followed of its result, and five of that result's gradient: ln of the
largest magnitude and of the root mean square, how peaked the whole and how uneven its rows are, and the share of exact
zeros. Each block is seen before a normalisation brings it back into range, and with less noise than a gradient has.
"""

from __future__ import annotations

import numpy as np

from bitwitness.capture.light import LightStep, Looks, Vector
from bitwitness.finding import Finding, Severity
from bitwitness.sense.selftest import NAMES, seen, self_test
from bitwitness.site import Site
from bitwitness.stats.history import History

FEATURES = ("largest magnitude", "root mean square", "largest magnitude over the mean", "largest row", "share of zeros")
# Deviations of each feature below which nothing is told from chance, in natural logarithms, as the trend's.
_FLOOR = (0.05, 0.05, 0.05, 0.05, 0.15)
_WHAT = ("output", "gradient of the output")
_SITE = (("forward", "out0"), ("backward", "grad_out0"))
# Zeros below this share are as good as none: which rows are read changes, some are zeros by the mask of an attention, and
# a loss that begins to clip gives a few examples no gradient.
_FEW = 2e-2
_EXTREMES = (0, 2, 3)  # features that grow with the number of values
_NAMED = 3  # suspicions of one step: the strongest say where to look, more say the same
_STEADY = 20  # steps of finite numbers after which one that is not is worth a suspicion


class ActivationsSensor:
    """Suspects a module whose result, or the gradient of that, leaves its own history by more than ``z`` deviations.

    Sees what a normalisation, a gate or a saturation hides from the gradients, and faults in the backward where they are large
    against one activation's gradient. Does not see inside compiled regions, nor operators between the modules that are looked
    at before these change such a result, nor, of large results, single elements of rows that this step does not read.
    """

    name = "activations"

    def __init__(self, modules: int, *, z: float, warmup: int = 20) -> None:
        floor = np.broadcast_to(np.array(_FLOOR)[None, :, None], (2, len(_FLOOR), modules)).reshape(-1)
        self.history = History(floor.size, warmup=warmup, z=z, floor=floor)

    def look(self, light: LightStep) -> list[Finding]:
        """Return suspicions about this step, at most three, the strongest first; the history is not changed."""
        looks = light.looks
        if looks is None or not looks.modules:
            return []
        table = self.history.scores(_values(light, looks)).reshape(2, len(_FLOOR), -1)
        # an extreme of fewer values is smaller: an expert that got one token
        table[:, _EXTREMES] = np.maximum(table[:, _EXTREMES], 0.0)
        strongest = np.abs(table).max(axis=1).reshape(-1)  # of each module's result, then of each gradient
        limit = self.history.threshold
        found = [
            self._finding(light, looks, int(i), table) for i in np.argsort(-strongest)[:_NAMED] if strongest[i] > limit
        ]
        return found or self._not_finite(light, looks)

    def learn(self, light: LightStep, *, false_alarm: bool = False) -> None:
        """Take this step, which was not proven wrong, in; ``false_alarm``: a rank suspected it."""
        if light.looks is not None and light.looks.modules:
            self.history.learn(_values(light, light.looks), false_alarm=false_alarm)

    def _not_finite(self, light: LightStep, looks: Looks) -> list[Finding]:
        """Suspect a result that is not finite for the first time, and that no gradient tells of."""
        if not light.finite:
            return []  # said by those who look for it
        seen = self.history.seen.reshape(2, len(_FLOOR), -1)[0, 0]
        bad = np.flatnonzero(np.isinf(looks.figures[0, 0]) & (seen >= _STEADY))
        if not bad.size:
            return []
        message = f"{looks.modules[bad[0]]}: the output is not finite, for the first time"
        return [self._tell(light, looks, 0, int(bad[0]), message, {"modules": int(bad.size)})]

    def _finding(self, light: LightStep, looks: Looks, place: int, table: Vector) -> Finding:
        direction, module = divmod(place, len(looks.modules))
        feature = int(np.abs(table[direction, :, module]).argmax())
        entry = np.ravel_multi_index((direction, feature, module), table.shape)
        score = float(table[direction, feature, module])
        mean, spread = float(self.history.mean[entry]), float(self.history.spread[entry])
        value = float(_values(light, looks)[entry])
        low, usual, high = (_natural(feature, mean + k * spread) for k in (-2.0, 0.0, 2.0))
        message = (
            f"{looks.modules[module]}: {FEATURES[feature]} of the {_WHAT[direction]} is {_natural(feature, value):.3g}, "
            f"its usual {low:.3g} to {high:.3g} ({score:+.1f} deviations)"
        )
        evidence = {
            "feature": FEATURES[feature],
            "of": _WHAT[direction],
            "z": score,
            "threshold": self.history.threshold,
            "value": _natural(feature, value),
            "usual": usual,
            "usual_low": low,
            "usual_high": high,
        }
        return self._tell(light, looks, direction, module, message, evidence)

    def _tell(
        self, light: LightStep, looks: Looks, direction: int, module: int, message: str, evidence: dict[str, object]
    ) -> Finding:
        phase, slot = _SITE[direction]
        site = Site(looks.modules[module], "output", 0, phase, slot).at(rank=light.rank, step=light.step)
        return Finding(self.name, site, Severity.WARNING, message, evidence, light.step, light.rank)


def _values(light: LightStep, looks: Looks) -> Vector:
    """Return what is followed, float64 [2 * 5 * M]; NaN where a module did not run, gave zeros alone, or an overflow."""
    top, square, row, zeros = looks.figures.transpose(1, 0, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = np.log(np.stack([top, square, top / square, row / square, zeros + _FEW]))
    values = sizes.transpose(1, 0, 2)
    if light.scaled and not light.finite:
        values = np.full_like(values, np.nan)  # an overflow, which the scaler takes care of
    return np.where(np.isfinite(values), values, np.nan).reshape(-1)


def _natural(feature: int, logarithm: float) -> float:
    """Return a followed number in its own unit."""
    value = float(np.exp(logarithm))
    return max(0.0, value - _FEW) if feature == len(_FLOOR) - 1 else value


@self_test("activations", "what modules compute, against its own history")
def _proof() -> str:
    def light(step: int, spoiled: float = 1.0) -> LightStep:
        figures = np.exp(np.random.default_rng(step).normal(0.0, 0.02, (2, 4, len(NAMES))))
        figures[:, 3] = 0.0
        figures[0, 0, 3] *= spoiled
        return LightStep(step, 0, NAMES, np.ones(1), np.ones(1), looks=Looks(NAMES, figures))

    sensor = ActivationsSensor(len(NAMES), z=9.0)
    for step in range(30):
        sensor.learn(light(step))
    return seen(sensor.look(light(30)), sensor.look(light(30, spoiled=1e3)))
