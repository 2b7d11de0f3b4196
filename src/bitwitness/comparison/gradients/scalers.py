"""Whether a loss is scaled as gradient scalers do it: by a power of two that stands in one tensor of its own."""

from __future__ import annotations

import math
from collections.abc import Callable

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.measuring.relation import numbers_of
from bitwitness.comparison.suspect import Suspect

_EXACT = 1e-6
"""How far the logarithm of a power of two may be from a whole number: factors are taken from norms of equal numbers."""

_LEAST_OF_SCRIPTS = 16.0
"""The least loss scale that a script multiplies by itself, as a number: smaller ones may be meant otherwise."""


def is_power_of_two(number: float) -> bool:
    """Tell whether a factor is a power of two."""
    exponent = math.log2(number) if number > 0 else 0.5
    return abs(exponent - round(exponent)) < _EXACT


def multiplied_by_scalers(differences: Differences, ratio: float, is_one: Callable[[float], bool]) -> bool:
    """Return whether losses are multiplied by powers of two, run B's ``ratio`` times run A's; 1 where a run has no scaler."""
    a, b, alignment = differences.a, differences.b, differences.alignment
    for frame, lone, wanted in ((a, alignment.lone(first=True), 1 / ratio), (b, alignment.lone(first=False), ratio)):
        if any(is_one(scale / wanted) for node in lone for scale in scales_of(frame, node)):
            return True
    for pair in alignment.pairs:
        if scales := scales_of(a, pair.a, [row for row, _ in pair.inputs]):
            others = scales_of(b, pair.b, [row for _, row in pair.inputs])
            if any(is_one(second / (ratio * first)) for first in scales for second in others):
                return True
    return False


def scale_of_one(differences: Differences) -> float | None:
    """Return how many times run B's loss is run A's by the scaler of the one run that computes in float16, if it is so."""
    sides = (differences.a, True), (differences.b, False)
    found = [
        [scale for node in differences.alignment.lone(first=first) for scale in scales_of(frame, node)]
        if differences.precisions is not None and frame.computed == "float16"
        else []
        for frame, first in sides
    ]
    if len(set(found[0] + found[1])) != 1:
        return None
    return found[1][0] if found[1] else 1.0 / found[0][0]


def is_scalers(differences: Differences, suspect: Suspect) -> bool:
    """Tell whether a suspect is that a scaler scales the loss of the one run that computes in float16."""
    frame = differences.a if suspect.side == "a" else differences.b
    if suspect.lone is None or differences.precisions is None or frame.computed != "float16":
        return False
    return bool(scales_of(frame, suspect.lone))


def is_scaled(frame: StepFrame) -> bool:
    """Tell whether a run multiplies a single number by a loss scale, as far as operators were recorded."""
    return any(scales_of(frame, node) for node in frame.nodes if (node.kind, node.phase) == ("op", "forward"))


def scales_of(frame: StepFrame, node: Node, rows: list[int] | None = None) -> list[float]:
    """Return the powers of two that a product of single numbers reads, or that a script's own scale is."""
    if node.op != "mul" or any(frame.count[row] != 1 for row in node.rows):
        return []
    tops = [numbers_of(frame, row).max for row in (node.inputs if rows is None else rows)]
    if len(tops) == 1 and tops[0] and (made := numbers_of(frame, node.outputs[0]).max / tops[0]) >= _LEAST_OF_SCRIPTS:
        return [made] if is_power_of_two(made) else []
    return [top for top in tops if top > 1 and is_power_of_two(top)]
