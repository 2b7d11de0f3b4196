"""How weights move from one step to the next, against how they usually do.

An optimizer changes a parameter's norm and its largest value a little at each step, and much alike from step to step; a bit
that flips in memory changes one of them by more. Two numbers of each parameter are followed: the step of ln L2, and that of the
largest value over L2.
"""

from __future__ import annotations

import numpy as np

from bitwitness.capture.light import LightStep, Vector
from bitwitness.finding import Finding, Severity
from bitwitness.sense.selftest import NAMES, seen, self_test
from bitwitness.site import Site
from bitwitness.stats.history import History

FEATURES = ("L2 norm", "largest value")
# Changes of each feature below which nothing is told from an update's chance. The largest value is one element's, and moves
# as that one's gradient does.
_FLOOR = (1e-3, 2e-3)
_NAMED = 3  # suspicions of one step: the strongest say where to look, more say the same
_FEW = 2  # parameters that move together through no fault: one strikes a single parameter
_USUAL = 2.0  # deviations that this many are often off by, of some dozens
_WARMUP = 20  # steps before it speaks: at first biases grow from nothing


class WeightsSensor:
    """Suspects a parameter that moved from one step to the next by more than ``z`` deviations beyond its usual.

    What moves several parameters (a jump of the learning rate, a checkpoint that is loaded) is taken off: scores are divided by
    the second largest of them. Sees a corrupted weight at the next step's beginning. Does not see what leaves norm and largest
    value as they are (a permutation, a sign of one among many), nor anything in sharded parameters.
    """

    name = "weights"

    def __init__(self, parameters: int, *, z: float) -> None:
        self.history = History(2 * parameters, warmup=_WARMUP, z=z, floor=np.repeat(_FLOOR, parameters))
        self._before: Vector | None = None

    def look(self, light: LightStep) -> list[Finding]:
        """Return suspicions about the weights that this step began with, at most three; nothing is changed."""
        moves = self._moves(light)
        if moves is None or self.history.steps < _WARMUP:
            return []
        scores = self.history.scores(moves)
        table = scores.reshape(2, -1)
        table = table / max(1.0, _together(np.abs(table).max(axis=0)))
        strongest = np.abs(table).max(axis=0)
        limit = self.history.threshold
        return [
            self._finding(light, int(i), table, moves) for i in np.argsort(-strongest)[:_NAMED] if strongest[i] > limit
        ]

    def learn(self, light: LightStep, *, false_alarm: bool = False) -> None:
        """Take this step's weights, which were not proven wrong, in; ``false_alarm``: a rank suspected it."""
        moves = self._moves(light)
        if moves is not None:
            self.history.learn(moves, false_alarm=false_alarm)
        self._before = light.weights

    def forget_last(self) -> None:
        """Forget the weights seen last: others were trained meanwhile."""
        self._before = None

    def _moves(self, light: LightStep) -> Vector | None:
        """Return what is followed, float64 [2 P], NaN where there is nothing; None where two steps are not known."""
        now, before = light.weights, self._before
        if now is None or before is None or now.shape != before.shape:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            moves = np.stack([np.log(now[0]) - np.log(before[0]), (now[1] - before[1]) / before[0]])
        return np.where(np.isfinite(moves), moves, np.nan).reshape(-1)

    def _finding(self, light: LightStep, index: int, table: Vector, moves: Vector) -> Finding:
        feature = int(np.abs(table[:, index]).argmax())
        score, entry = float(table[feature, index]), feature * table.shape[1] + index
        before, now = (float("nan") if m is None else float(m[feature, index]) for m in (self._before, light.weights))
        message = (
            f"{light.names[index]}: its {FEATURES[feature]} went from {before:.6g} to {now:.6g} between two steps, "
            f"{score:+.1f} deviations from how it usually moves"
        )
        evidence = {
            "feature": FEATURES[feature],
            "z": score,
            "threshold": self.history.threshold,
            "before": before,
            "now": now,
            "move": float(moves[entry]),
            "usual_move": float(self.history.mean[entry]),
        }
        site = Site.of_parameter(light.names[index], "param").at(rank=light.rank, step=light.step)
        return Finding(self.name, site, Severity.WARNING, message, evidence, light.step, light.rank)


def _together(strongest: Vector) -> float:
    """Return how far parameters moved together, in deviations, from the larger score of each, [P].

    A learning rate that jumps moves those most that usually move least, so the median says too little. A fault is in one
    parameter, and leaves the second largest where it is.
    """
    return float(np.sort(strongest)[-_FEW]) / _USUAL if len(strongest) >= _FEW else 0.0


@self_test("weights", "how weights move from step to step")
def _proof() -> str:
    def light(step: int, spoiled: float = 1.0) -> LightStep:
        weights = np.full((2, len(NAMES)), 1.0 + 1e-3 * step)
        weights[1, 3] *= spoiled
        return LightStep(step, 0, NAMES, np.ones(1), np.ones(1), weights=weights)

    sensor = WeightsSensor(len(NAMES), z=9.0)
    for step in range(30):
        sensor.learn(light(step))
    return seen(sensor.look(light(30)), sensor.look(light(30, spoiled=1e3)))
