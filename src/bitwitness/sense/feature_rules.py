"""The formulas of the reference systems' feature-value detection, as functions of values on the host.

Squares are rounded to float32, as the vendors compute them: a value above 1.8e19 squares to Inf, and so
strikes even while the average is still warming up. Taken in float64 it would be a finite square, and be
averaged in. Nothing is lost by it: the evidence holds the largest value itself.

Where the vendors' text leaves a case open: a jump relative to a history without spread (max = min) is no
jump; V3's average does not start from a zero, above which everything is; NaN and Inf are not taken into V1's
and V2's range nor into V3's average, which they would spoil for ever (in the vendors' systems the training
ends there); under a gradient scaler they are ordinary, and told at level info.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from bitwitness.capture.light import Vector

# The reference systems' own figures.
V1_MINIMUM_STEPS = 7  # values of a tap before V1 looks at jumps
V2_MINIMUM_STEPS = 100  # the same for V2
BETA = 0.99  # weight of the past in the averages
WARM_UP = 10  # learned values before an average is compared with
V3_UPPER = (1e6, 1e4)  # times its average that a value may be: beyond is an error, a warning

Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]


class Level(IntEnum):
    """The reference's two levels: 1 is an error, 2 a warning."""

    NORMAL = 0
    ERROR = 1
    WARNING = 2


# V1 and V2: the value itself, and its jump


@dataclass(slots=True)
class JumpHistory:
    """What V1 and V2 remember of one tap."""

    previous: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    count: int = 0

    def jump(self, value: float) -> float:
        """Return ``|value - previous| / (high - low)``, or 0 where the range is empty."""
        spread = self.high - self.low
        return abs(value - self.previous) / spread if spread > 0 else 0.0

    def learn(self, value: float) -> None:
        """Take a value into the history."""
        self.count += 1
        if math.isfinite(value):
            self.previous = value
            self.low = min(self.low, value)
            self.high = max(self.high, value)


@dataclass(frozen=True, slots=True)
class JumpRule:
    """Bounds on the value and on its jump, for level 1 and 2; jumps count after ``minimum_steps`` values."""

    minimum_steps: int
    upper: tuple[float, float]
    sigma: tuple[float, float]

    def level(self, value: float, history: JumpHistory) -> Level:
        """Judge a value against the history that does not hold it yet."""
        if not math.isfinite(value):
            return Level.ERROR
        jump = history.jump(value) if history.count >= self.minimum_steps else 0.0
        if value > self.upper[0] or jump > self.sigma[0]:
            return Level.ERROR
        if value > self.upper[1] or jump > self.sigma[1]:
            return Level.WARNING
        return Level.NORMAL


# V3 and the combined scheme: the value against the average


@dataclass(frozen=True, slots=True)
class Averages:
    """What V3 and the combined scheme remember of P parameters, [P] each.

    ``average`` and ``previous`` are of squares, float64; ``count`` counts the values seen, ``learned`` (the
    vendors' none_zero_count) those that went into the average.
    """

    average: Vector
    previous: Vector
    count: Counts
    learned: Counts

    @classmethod
    def none(cls, parameters: int) -> Averages:
        """Return the state before the first step."""
        none, nothing = np.zeros(parameters), np.zeros(parameters, dtype=np.int64)
        return cls(none, none, nothing, nothing)

    def after(self, value: Vector, learn: Mask) -> Averages:
        """Return the state after one more value of each; ``learn`` selects those that move the average."""
        moved = BETA * self.average + (1.0 - BETA) * np.where(learn, value, 0.0)
        return Averages(np.where(learn, moved, self.average), value, self.count + 1, self.learned + learn)

    @property
    def corrected(self) -> Vector:
        """The average over ``1 - 0.99^n``, n values having been learned: without the bias of its start."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.where(self.learned > 0, self.average / (1.0 - BETA**self.learned), self.average)


def squares(absmax: Vector) -> Vector:
    """Return the feature value (max absolute value) squared: rounded to float32, Inf where that overflows."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.square(absmax.astype(np.float32)).astype(np.float64)


def judge_combined(
    value: Vector, before: Averages, upper_thresh1: float, upper_thresh2: float
) -> tuple[Mask, Vector, Averages]:
    """Judge values, float64 [P], by the combined scheme; return strikes, thresholds T1, and the state after.

    With the average corrected for its start: T1 = average * upper_thresh1, T2 = average * upper_thresh2, from
    10 learned values on; before, T1 = T2 = value, so that only NaN and Inf strike. A strike is a value above
    T1 that also differs from the previous one by more than T1. Other values, if not 0 and not above T2, are
    learned.
    """
    ripe = (before.learned >= WARM_UP) & (before.average != 0)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and Inf are asked for by name
        first = np.where(ripe, before.corrected * upper_thresh1, value)
        second = np.where(ripe, before.corrected * upper_thresh2, value)
        strikes = ~np.isfinite(value) | ((value > first) & (np.abs(value - before.previous) > first))
        learn = ~strikes & (value != 0) & (value <= second)
        return strikes, first, before.after(value, learn)


def judge_v3(value: Vector, before: Averages, upper: tuple[float, float] = V3_UPPER) -> tuple[Counts, Vector, Averages]:
    """Judge values, float64 [P], by V3; return the levels, the thresholds of level 1, and the state after.

    The average starts as the first value that is not 0, and is corrected as if it had started from zero.
    """
    finite = np.isfinite(value)
    start = finite & (before.average == 0)
    before = replace(before, average=np.where(start, value, before.average), learned=before.learned * ~start)
    with np.errstate(over="ignore", invalid="ignore"):
        first = before.corrected * upper[0]
        error = ~finite | (value > first)
        warning = ~error & (value > before.corrected * upper[1])
        after = before.after(value, finite & (before.average != 0))
    return np.where(error, Level.ERROR, np.where(warning, Level.WARNING, Level.NORMAL)), first, after
