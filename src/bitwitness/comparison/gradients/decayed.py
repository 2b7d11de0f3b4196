"""Weight decay that one run's optimizer adds to the gradients, and the other run's script: they end alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.measuring.relation import numbers_of
from bitwitness.oracle.recorded import arguments

_OF_DECAY, _OF_GRADIENT = 1e-2, 1e-5
"""How far sketches may be from adding up: times the sizes of what is decayed in one run more, and of the gradient."""


def decayed_by_hand(differences: Differences) -> set[str]:
    """Return the parameters that decay as much in both runs, by other hands: gradient and decay add up to the same.

    Sketches are linear, so that they tell. An optimizer that decays weights beside their gradients (AdamW) is none of this.
    """
    updates = [pair for pair in differences.alignment.pairs if pair.a.kind == "optimizer"]
    return {pair.a.module for pair in updates if _ends_alike(differences, pair)}


def _ends_alike(differences: Differences, pair: Pair) -> bool:
    sums, more, gradient, decays = [], 0.0, 0.0, []
    for frame, node in ((differences.a, pair.a), (differences.b, pair.b)):
        rows = {frame.text("slot", row): row for row in node.inputs}
        decay = _decay(frame, node)
        if decay is None or not {"grad", "param"} <= set(rows):
            return False
        read, weight = (numbers_of(frame, rows[slot]) for slot in ("grad", "param"))
        sums.append(read.sketch + decay * weight.sketch)
        decays.append(decay)
        more, gradient = max(more, weight.l2), max(gradient, read.l2)
    if decays[0] == decays[1]:
        return False
    gap, limit = abs(sums[0] - sums[1]), _OF_DECAY * abs(decays[0] - decays[1]) * more + _OF_GRADIENT * gradient
    return math.isfinite(gap) and gap <= limit


def _decay(frame: StepFrame, node: Node) -> float | None:
    """Return by how much of a parameter an optimizer adds to its gradient; None where it does something else with it."""
    found = arguments(frame.text("args", node.rows[0]))
    settings: Mapping[str, Any] = found.get("k", {})
    decay = settings.get("weight_decay")
    if found.get("f") == "AdamW" or settings.get("decoupled_weight_decay") or settings.get("maximize"):
        return None
    return float(decay) if isinstance(decay, int | float) else None
