"""A step as a whole, of two runs that compute in different precisions: its loss, and half of its gradients.

What single operators may differ by in a coarse dtype grows along the depth, up to where nothing exceeds it. The loss is a mean,
in which rounding errors cancel, and gradients of many parameters differ by much only where something in common does.
"""

from __future__ import annotations

from statistics import median

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.rewriting.outcome import gradients_of
from bitwitness.comparison.suspect import Exceeding

_GRADIENTS = 16.0
"""Unit roundoffs that half of the gradients stay within. Seen in healthy first steps in bfloat16, of twenty architectures: up
to 3e-2, 9e-2 of convolutions behind batch norms, whose losses differed by less than 8e-4; of losses up to 3.8e-3, of a CLIP."""


def beyond_precision(differences: Differences, rank: int, step: int) -> list[Exceeding]:
    """Return the loss that differs most, if that and half of the gradients differ by more than the coarser dtype leaves."""
    losses = differences.alignment.losses
    gradients = [differences.change_of[pair.outputs[0][0]] for pair in gradients_of(differences)]
    apart = differences.parted_before or differences.other_losses
    if differences.precisions is None or apart or not losses or not gradients:
        return []
    limit = differences.slack * differences.roundoff_inside
    worst = max(losses, key=lambda pair: differences.change_of[pair.outputs[0][0]])
    change = differences.change_of[worst.outputs[0][0]]
    if change <= limit or median(gradients) <= _GRADIENTS * limit:
        return []
    return [Exceeding(f"{worst.a.site}.{differences.a.text('slot', worst.outputs[0][0])}", rank, step, change, limit)]
