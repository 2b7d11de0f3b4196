"""Gradients too small for the dtype that their backward computes in: float16 without a loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.chains import Chain, row_at
from bitwitness.comparison.gradients.scalers import is_scaled
from bitwitness.comparison.measuring.allowance import rms
from bitwitness.comparison.suspect import Suspect

_SMALLEST = 2.0**-24
"""The smallest number that float16 holds (IEEE 754: 2 to the power of -14 - 10); twice as many have one digit more."""
_FEW = 16.0
"""Times the smallest one, below which a number is rounded to some sixteenth of itself, or to nothing."""
_NOT_SCALED = "; its loss is not scaled for the backward (GradScaler)"
_APART = 0.1
"""Relative change of half of the gradients from which on rounding them so is seen."""


def too_small(differences: Differences, chains: Sequence[Chain]) -> str:
    """Say that one run's gradients are rounded to nothing in float16, if most are that small and it shows."""
    rows = [chain.a[1] for chain in chains]
    if median(0.0 if row is None else differences.change_of[row] for row in rows) < _APART:
        return ""
    for side, frame, of in (("A", differences.a, [c.a for c in chains]), ("B", differences.b, [c.b for c in chains])):
        left = [rms(frame, row) for one in of if (row := one[0]) is not None]
        read = [rms(frame, row) for one in of if (row := row_at(one, 2)) is not None]
        if frame.computed != "float16" or not left or not read or median(left) > _FEW * _SMALLEST:
            continue
        zeros = sum(size == 0.0 for size in left)
        below = f"below {median(left):.2g}" if median(left) else "zero"
        nothing = f", those of {zeros} are zero throughout" if zeros else ""
        return (
            f"the gradients ({len(chains)} parameters) of run {side} are smaller than float16 holds: "
            f"half of them are {below}{nothing}{'' if is_scaled(frame) else _NOT_SCALED}"
        )
    return ""


def is_in_backward(suspect: Suspect) -> bool:
    """Tell whether a suspect is an operator of the backward, which computes with such gradients."""
    return suspect.node is not None and suspect.node.phase == "backward"
