"""A step whose loss is scaled: its gradients as they would be without, where the optimizer reads them unscaled anyway."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.causes import GradientChains
from bitwitness.comparison.gradients.chains import Chain, row_at
from bitwitness.comparison.gradients.losses import loss_ratio
from bitwitness.comparison.gradients.scalers import is_power_of_two, scale_of_one
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import Floats, Node, StepFrame
from bitwitness.comparison.measuring.allowance import rms
from bitwitness.comparison.measuring.relation import not_finite
from bitwitness.oracle.names import canonical

_NEAR = 0.01
"""Relative deviation from a power of two up to which a loss scale is one."""
_LARGE = 10.0
"""Times as large, at most, that half of a scaled run's gradients are from which the scale was taken: scales are larger."""
_LARGEST_TAKEN = 1 / 16
"""What gradients are multiplied by between backward and step, at most, that is a loss scale's inverse."""
_MULTIPLY = ("mul", "div")
_SCALED = ("min", "max", "mean", "l2", "sketch")


def loss_scale(differences: Differences) -> float | None:
    """Return how many times run B's loss scale is run A's, where both optimizers read gradients without it; None if equal."""
    chains = GradientChains(differences)
    scale = chains.scaled_back() or _of_losses_alone(differences, chains) or _of_scaler(differences, chains)
    if scale is None:
        return None
    # As scalers' are; what is found of it in rounded gradients is off by a little.
    power = 2.0 ** round(math.log2(scale))
    return power if abs(scale / power - 1.0) < _NEAR else scale


def _of_scaler(differences: Differences, chains: GradientChains) -> float | None:
    """Return the scale of the one run that has a scaler, unless its optimizer reads gradients that are as much too large."""
    scale = None if differences.parted_before else scale_of_one(differences) or _taken_out(differences, chains)
    ends = [(row_at(chain.a, 2), row_at(chain.b, 2)) for chain in chains.chains]
    rows = [(i, j) for i, j in ends if i is not None and j is not None]
    sizes = [(rms(differences.a, i), rms(differences.b, j)) for i, j in rows]
    if scale is None or not sizes or any(not_finite(differences.a, differences.b, *one) for one in rows):
        return None  # the last: it is too large
    scaled = median((y / x if x else 0.0) if scale > 1 else (x / y if y else 0.0) for x, y in sizes)
    return scale if scaled < _LARGE else None


def _taken_out(differences: Differences, chains: GradientChains) -> float | None:
    """Return the scale that the one run in float16 divides its gradients by, where no operators show what it multiplies by.

    Its inverse is what they are multiplied by; where they are clipped as well, the losses tell it.
    """
    if differences.precisions is None or differences.has_operators:
        return None
    ratio = loss_ratio(differences)
    for frame, by, sign in zip((differences.a, differences.b), chains.multiplied, (-1, 1), strict=True):
        if frame.computed != "float16":
            continue
        if by is not None and 0 < by <= _LARGEST_TAKEN and is_power_of_two(by):
            return float((1.0 / by) ** sign)
        scale = ratio**sign if ratio is not None and ratio > 0 else 1.0
        power = 2.0 ** round(math.log2(scale))
        if power * _LARGEST_TAKEN >= 1.0 and abs(scale / power - 1.0) < _NEAR:
            return float(power**sign)
    return None


def _of_losses_alone(differences: Differences, chains: GradientChains) -> float | None:
    """Return how many times run B's losses are run A's where gradients agree, of which nobody tells what the backward left.

    A script may divide gradients in place, by the number of micro-batches, before anybody looks at them.
    """
    whole = all(_is_untouched(differences, chain) and chains.left_alike(chain) for chain in chains.chains)
    ratio = loss_ratio(differences)
    if differences.parted_before or not chains.chains or not whole or ratio is None or ratio <= 0.0:
        return None
    times = max(ratio, 1.0 / ratio)  # a scale, micro-batches, ranks: other ratios come of another term in the loss
    a, b = differences.a, differences.b
    known = [max(x, y) / max(min(x, y), 1) for x, y in ((a.micros, b.micros), (a.ranks, b.ranks))]
    is_scale = any(one > 1 and abs(times / one - 1.0) < _NEAR for one in (round(times), *known))
    return ratio if is_scale and _may_be_multiplied(differences) else None


def _may_be_multiplied(differences: Differences) -> bool:
    """Return whether single numbers are multiplied otherwise in each run, as by the micro-batches, if that was recorded."""
    alignment, frames = differences.alignment, (differences.a, differences.b)
    nodes = [(frames[not first], node) for first in (True, False) for node in alignment.lone(first=first)]
    nodes += [(frames[0], pair.a) for pair in alignment.pairs if has_other_arguments(differences, pair)]
    return not differences.has_operators or any(multiplies_one_number(*one) for one in nodes)


def multiplies_one_number(frame: StepFrame, node: Node) -> bool:
    """Return whether a node multiplies a single number, as a loss is by a scale or a share."""
    is_one = (node.kind, node.phase) == ("op", "forward") and canonical(node.op) in _MULTIPLY
    return is_one and bool(node.outputs) and all(frame.count[row] == 1 for row in node.outputs)


def has_other_arguments(differences: Differences, pair: Pair) -> bool:
    """Return whether an operator was called with other numbers in each run."""
    args = [frame.text("args", node.rows[0]) for frame, node in ((differences.a, pair.a), (differences.b, pair.b))]
    return pair.a.kind == "op" and args[0] != args[1]


def _is_untouched(differences: Differences, chain: Chain) -> bool:
    """Return whether nothing is known to have happened to a gradient between the backward and the optimizer."""
    for frame, rows in ((differences.a, chain.a), (differences.b, chain.b)):
        if len({int(frame.value[row]) for row in rows if row is not None}) > 1:
            return False
    return True


def without_scale(differences: Differences, scale: float) -> StepFrame:
    """Return run B's step with its loss scale taken out of what the backward made, and of single numbers before it.

    A backward also reads what the forward left: of each value that both runs have, its size tells which it is. A gradient that
    only run B recorded before its optimizer changed it is what the backward left.
    """
    a, b = differences.a, differences.b
    gradients = b.texts["kind"].equals("gradient")
    found = b.texts["phase"].equals("backward") | gradients | _on_the_way_to_the_loss(b)
    factors: Floats = np.where(gradients & b.texts["slot"].equals("local"), 1.0 / scale, 1.0)
    for pair in differences.alignment.pairs:
        for i, j in (*pair.inputs, *pair.outputs):
            if found[j] and _is_scaled(float(a.numbers["l2"][i]), float(b.numbers["l2"][j]), scale):
                factors[j] = 1.0 / scale
    table = b.table
    for name in _SCALED:
        column = table.schema.get_field_index(name)
        numbers = pa.array(b.numbers[name] * factors, pa.float64(), mask=np.isnan(b.numbers[name]))
        table = table.set_column(column, table.schema.field(column), numbers)
    hashes = table.schema.get_field_index("hash")
    kept = pa.array(b.hash, pa.int64(), mask=~b.hashed | (factors != 1.0))
    return StepFrame(table.set_column(hashes, table.schema.field(hashes), kept), factors)


def _on_the_way_to_the_loss(frame: StepFrame) -> npt.NDArray[np.bool_]:
    """Return the rows of single numbers without a name of which the loss is made by operators on single numbers alone."""
    made = {int(frame.value[row]): node for node in frame.nodes if node.kind == "op" for row in node.outputs}
    loss = frame.texts["kind"].equals("saved") & frame.texts["op"].equals("loss")
    waiting, values = [int(value) for value in frame.value[loss]], set[int]()
    while waiting:
        value = waiting.pop()
        node = made.get(value)
        values.add(value)
        if node is not None and all(frame.count[row] == 1 for row in node.rows):
            waiting += [int(frame.value[row]) for row in node.inputs if int(frame.value[row]) not in values]
    found: npt.NDArray[np.bool_] = (
        np.isin(frame.value, list(values)) & (frame.count == 1) & (frame.texts["name"].codes < 0)
    )
    return found


def _is_scaled(size_a: float, size_b: float, scale: float) -> bool:
    """Return whether a value of run B is nearer to run A's times the scale than to run A's."""
    if not (0 < size_a < math.inf and 0 < size_b < math.inf):
        return False
    times = math.log(size_b / size_a)
    return abs(times - math.log(scale)) < abs(times)
