"""A function that is written otherwise than its reference is held against the rounding of its own formula, too."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from bitwitness.numerics import HALF, unit_roundoff
from bitwitness.trial.allowance import allowance
from bitwitness.trial.asked import COUNTS, FEW, MANY, Answer, Asked
from bitwitness.trial.result import FAIL, WARN

_SAME = 1e-5
"""Of what may be off in the dtype, what float64 may leave between two ways to write the same: it is 2^29 times finer."""
_STEPS, _STEPS_BACK = 1.0, 3.0
"""Units of rounding that several operators in a half type leave in the mean, at the most: sums in it leave more.

A gradient passes through more of them.
"""
_STEADY = 8.0
"""Times what noise moves a result by in most runs that it moves it by in any."""
_EXCUSED = 64.0
"""Times what rounding leaves of the reference's formula that it may leave of the function's own."""
_LOSES = "right only by what rounding does to its own formula, which loses more than the reference's does"
_ROUNDS = "right only because its own formula rounds intermediate results to {dtype}, which the reference does not"
_UNSTABLE = (
    "an unstable formula: rounding takes {times:.0f} times from it what it takes from the reference's: {got:.6g} where "
    "{due:.6g} is due"
)


def by_its_own_formula(asked: Asked, within: Tensor, allowed: Tensor) -> Answer:
    """Ask it with all of it computed in float32, and in half types with each of its operators rounding to its own dtype.

    A formula that gives something else in float64 stays wrong. ``within``, ``allowed``: by the reference's.
    """
    for stepwise in (False, True) if asked.dtype in HALF else (False,):
        for draws in (FEW, MANY):
            runs = asked.these(asked.oracle.own(draws=draws, stepwise=stepwise))
            if len(runs) <= draws or any(t.shape != asked.truth.shape for t in runs):
                break
            noisy = [asked.truth + (t - runs[0]).masked_fill(~runs[0].isfinite(), 0.0) for t in runs[1:]]
            if _is_unsteady([float((n - asked.truth).nan_to_num(0.0, 0.0, 0.0).norm()) for n in noisy]):
                return FAIL, "", within, allowed
            room = allowance(asked.truth, noisy, asked.dtype)
            known = asked.truth.isfinite()
            same = 1.0 if asked.dtype is torch.float64 else _SAME  # there is no finer dtype to tell
            if not bool(((runs[0] - asked.truth).abs() <= same * room)[known].all()):
                return FAIL, "", within, allowed  # it is no other way to write the same
            most = (_STEPS_BACK if asked.slot.startswith("grad") else _STEPS) * unit_roundoff(asked.dtype)
            if stepwise and _size(noisy, asked.truth, known) > most:
                break
            room = torch.maximum(allowed, room)
            now = within | ((asked.value - asked.truth).abs() <= room)
            if bool(now.all()):
                if asked.is_elementwise and (unstable := _unstable(asked, within, allowed)):
                    return FAIL, unstable, within, allowed
                return WARN, _ROUNDS.format(dtype=str(asked.dtype)[6:]) if stepwise else _LOSES, now, room
    return FAIL, "", within, allowed


def _unstable(asked: Asked, within: Tensor, allowed: Tensor) -> str:
    """Return what is to be told where its formula cancels what the reference's keeps: log(1 + x) for log1p(x)."""
    size = asked.truth.abs().nan_to_num(0.0, 0.0, 0.0)
    excused = within | (size < COUNTS * size.max())
    times = ((asked.value - asked.truth).abs() / allowed.clamp_min(1e-300)).masked_fill(excused, 0.0).reshape(-1)
    at = int(times.argmax())
    if not float(times[at]) > _EXCUSED:
        return ""
    got, due = float(asked.value.reshape(-1)[at]), float(asked.truth.reshape(-1)[at])
    return _UNSTABLE.format(times=float(times[at]), got=got, due=due)


def _is_unsteady(moved: list[float]) -> bool:
    """Whether some of the runs are moved by far more than most: by something that is no rounding."""
    return max(moved) > _STEADY * statistics.median(moved)


def _size(noisy: list[Tensor], truth: Tensor, known: Tensor) -> float:
    """Return how far noise moves a result, of its norm."""
    moved = sum(float((n - truth)[known].square().sum()) for n in noisy) / len(noisy)
    size = float(truth[known].square().sum())
    return (moved / size) ** 0.5 if size else 0.0
