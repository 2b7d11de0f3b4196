"""Whether a loss is scaled as gradient scalers do it: by a power of two, in a tensor of its own or as a number."""

from __future__ import annotations

import math
from collections.abc import Callable

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.frame import Node, StepFrame
from bitwitness.comparison.relation import numbers_of
from bitwitness.oracle.recorded import arguments

_EXACT = 1e-6
"""How far the logarithm of a power of two may be from a whole number: factors are taken from norms of equal numbers."""


def is_power_of_two(number: float) -> bool:
    """Tell whether a factor is a power of two."""
    exponent = math.log2(number) if number > 0 else 0.5
    return abs(exponent - round(exponent)) < _EXACT


def multiplied_by_scalers(differences: Differences, ratio: float, is_one: Callable[[float], bool]) -> bool:
    """Return whether losses are multiplied by powers of two, run B's ``ratio`` times run A's; 1 where a run has no scaler."""
    a, b, alignment = differences.a, differences.b, differences.alignment
    for frame, lone, wanted in ((a, alignment.lone(first=True), 1 / ratio), (b, alignment.lone(first=False), ratio)):
        if any(is_one(scale / wanted) for node in lone for scale in _scales(frame, node, node.inputs)):
            return True
    for pair in alignment.pairs:
        own = _number(a, pair.a), _number(b, pair.b)
        if own[0] and own[1] and is_one(own[1] / (ratio * own[0])):
            return True
        if scales := _scales(a, pair.a, [row for row, _ in pair.inputs]):
            others = _scales(b, pair.b, [row for _, row in pair.inputs])
            if any(is_one(second / (ratio * first)) for first in scales for second in others):
                return True
    return False


def _scales(frame: StepFrame, node: Node, rows: list[int]) -> list[float]:
    """Return the powers of two that a product of single numbers reads."""
    if node.op != "mul" or any(frame.count[row] != 1 for row in node.rows):
        return []
    tops = [numbers_of(frame, row).max for row in rows]
    tops += [number] if (number := _number(frame, node)) is not None else []
    return [top for top in tops if top > 1 and is_power_of_two(top)]


def _number(frame: StepFrame, node: Node) -> float | None:
    """Return the power of two that a script itself multiplies a single number by; None where it is no such product."""
    if node.op != "mul" or any(frame.count[row] != 1 for row in node.rows):
        return None
    given = arguments(frame.text("args", node.rows[0])).get("a", [])
    numbers = [float(one) for one in given if isinstance(one, int | float) and not isinstance(one, bool)]
    return numbers[0] if len(numbers) == 1 and is_power_of_two(numbers[0]) else None
