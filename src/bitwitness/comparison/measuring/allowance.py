"""How much an operator's result may differ between two healthy runs: its own rounding, and what its inputs bring along.

Rounding errors of sums grow like the square root of the number of terms (Higham and Mary, "A new approach to probabilistic
rounding error analysis", 2019), and count relative to the terms, not to the result: a sum that cancels keeps the errors of
what it was summed from. Both are estimated from statistics; where the values themselves are kept, `oracle.recorded`
measures instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from bitwitness.comparison.matching.align import Group, Pair
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.changes import changes
from bitwitness.numerics import unit_roundoff
from bitwitness.oracle.names import CONTRACTIONS, PRODUCTS, canonical
from bitwitness.oracle.recorded import arguments

# Factors before the terms of `allowed`. Wider ones name fewer operators that are innocent, and overlook smaller differences;
# tests/test_compare.py holds them to both: sums in another order must not be named, planted differences must.
_ROUNDED = 8.0  # of the result's own unit roundoff: extremes of many elements differ by more than one alone
_EQUAL = 3.0  # the same of a coarse dtype, of equal inputs: computed in float32 and rounded once, a step of the last bit is two
_COARSE = 2.0**-12  # from which unit roundoff on that counts
_SUM = 4.0  # of what the order of summation leaves: the worst of many sums, not the usual one
# Of what the inputs' changes explain, where the operator's formula is known. Statistics estimate those to within a few times.
_CARRIED = 8.0
# The same where it is not: an operator may enlarge relative changes, as where numbers of one size are subtracted.
_CARRIED_GENERIC = 100.0
_GENERIC = 16.0  # of rounding there: several operations in one kernel
_SUMS = ("sum", "mean")
_CANCEL = ("log_softmax_backward_data", "softmax_backward_data")  # each row's result sums up to nothing
_NORMS = ("layer_norm", "batch_norm", "group_norm", "var_mean")
# Times the learning rate: what an optimizer that looks at signs may turn over. A turned sign moves a parameter by two steps;
# twice that leaves room for moments that differ.
_TURNED = 4.0
# Times the gradient's relative change that SGD's step may differ by before all of it counts as turned over.
_FOLLOWS_GRADIENT = 1000.0
# Times it where it is large, of a gradient that is rounding errors alone: a bias's before a batch norm.
_GRADIENTS = 2.0
# Times a parameter's own change that is left of it after the update.
_KEPT = 3.0
_DEFAULT_RATE = 1e-3  # where the recording does not tell: Adam's in torch
# Unit roundoffs that a fused operator and its parts may be apart: they round at different places, several times.
_FUSED = 1000.0
_FUSED_MOST = 0.03  # and as a relative change, for dtypes whose unit roundoff is large
_TF32 = 2.0**-11
_SUBNORMAL = 2.0**-25  # what the rounding of float16's subnormal numbers takes, whatever their size


def roundoff(dtype: str) -> float:
    """Return a dtype's unit roundoff by its name, ``tf32`` included; 0 for one that does not round."""
    if dtype == "tf32":
        return _TF32
    found = getattr(torch, dtype, None)
    return (
        unit_roundoff(found)
        if isinstance(found, torch.dtype) and (found.is_floating_point or found.is_complex)
        else 0.0
    )


def _rounded(frame: StepFrame, row: int) -> float:
    """Return a row's unit roundoff, which is more where float16 has few digits left because the values are small."""
    dtype, size = frame.text("dtype", row), rms(frame, row)
    return max(roundoff(dtype), _SUBNORMAL / size if dtype == "float16" and size else 0.0)


def rms(frame: StepFrame, row: int) -> float:
    """Return a row's root mean square; 0 if it is not known."""
    value = float(frame.numbers["l2"][row]) / math.sqrt(max(int(frame.count[row]), 1))
    return value if math.isfinite(value) else 0.0


def allowed(a: StepFrame, b: StepFrame, pair: Pair, out: int, carried: Sequence[float], inside: float = 0.0) -> float:
    """Return the relative change of a node's result that rounding, and the changes of its inputs, explain.

    Parameters
    ----------
    out
        Which of the pair's results.
    carried
        The change of each of the pair's inputs, noise included.
    inside
        The unit roundoff that a module may compute in, whatever dtype its result has.

    """
    row_a, row_b = pair.outputs[out]
    if any(math.isinf(c) for c in carried):
        return math.inf
    own = max(_rounded(a, row_a), _rounded(b, row_b))
    if not own and any(carried):
        return math.inf  # an index: which of two is larger may turn with the last bit
    if pair.a.kind == "module":
        own = max(own, inside)
    if pair.a.kind == "optimizer":
        return _update(a, pair, carried, own)
    wide = max((roundoff(a.text("dtype", row)) for row, _ in pair.inputs), default=own)
    # Parts of one batch in one precision are the same sums in a module's forward, whose results are rounded once more at most.
    sums = pair.a.kind == "module" and not (pair.a.phase == "forward" and a.computed == b.computed)
    accumulated = max(min(own or wide, 2.0**-24) or 2.0**-24, inside if sums else 0.0)
    size, change, op = max(rms(a, row_a), rms(b, row_b)), max(carried, default=0.0), canonical(pair.a.op)
    rounded = _EQUAL if pair.a.kind == "op" and not change and own > _COARSE else _ROUNDED
    if pair.a.kind == "op" and op in PRODUCTS:
        terms, scale = _contraction(a, pair)
        cancelled = max(1.0, scale / size) if size else 1.0
        return rounded * own + cancelled * (_SUM * accumulated * math.sqrt(terms) + _CARRIED * sum(carried))
    if _is_sum(a, pair, row_a, op):
        factor = _sum(a, pair, row_a, op, size)
        if op not in _SUMS:
            accumulated = max(
                accumulated, own
            )  # torch's layer norm on a CPU adds up its weight's gradient in the dtype itself
        return _ROUNDED * own + factor * (change + accumulated)
    return rounded * own + _generic(a, pair, op, size) * (_GENERIC * accumulated + _CARRIED_GENERIC * change)


def _is_sum(frame: StepFrame, pair: Pair, row: int, op: str) -> bool:
    """Return whether a result is a sum over its first input: a bias's or a norm's gradient is one, too."""
    if not pair.inputs or pair.a.kind != "op":
        return False
    return op in _SUMS or ("backward" in op and 2 * frame.count[row] <= frame.count[pair.inputs[0][0]])


def _contraction(frame: StepFrame, pair: Pair) -> tuple[float, float]:
    """Return the number of terms of each sum, and the size of the result if they did not cancel."""
    floats = [row for row, _ in pair.inputs if roundoff(frame.text("dtype", row))]
    matrices = [row for row in floats if len(frame.shapes[row]) > 1] or floats
    if len(matrices) < 2:
        return 1.0, 0.0
    x, y = matrices[-2:] if len(matrices) == 2 or canonical(pair.a.op) != "conv" else matrices[:2]
    elements = float(frame.count[x]) * float(frame.count[y])
    out = max(float(frame.count[pair.outputs[0][0]]), 1.0)
    shape = frame.shapes[x]
    terms = float(shape[-1]) if canonical(pair.a.op) in CONTRACTIONS and shape else math.sqrt(elements / out)
    return max(terms, 1.0), math.sqrt(max(terms, 1.0)) * rms(frame, x) * rms(frame, y)


def _sum(frame: StepFrame, pair: Pair, out: int, op: str, size: float) -> float:
    """Return the factor by which a sum's relative error exceeds its terms'."""
    row = pair.inputs[0][0]
    terms = max(float(frame.count[row]) / max(float(frame.count[out]), 1.0), 1.0)
    total = size * (terms if op == "mean" else 1.0)
    term = rms(frame, row)
    if "backward" in op and len(pair.inputs) > 1:
        term *= max(1.0, rms(frame, pair.inputs[1][0]))
    cancelled = max(1.0, math.sqrt(terms) * term / total) if total else math.inf
    return _CARRIED * cancelled * math.sqrt(terms)


def _generic(frame: StepFrame, pair: Pair, op: str, size: float) -> float:
    """Return the factor for an operator of which nothing special is known: rows of its first input are summed, perhaps."""
    if not pair.inputs:
        return 1.0
    row = pair.inputs[0][0]
    shape = frame.shapes[row]
    factor = math.sqrt(max(shape[-1] if shape else 1, 1))
    if op in _CANCEL and size:
        factor *= max(1.0, rms(frame, row) / size)
    if op in ("add", "sub") and size:
        factor = max(1.0, *(rms(frame, r) / size for r, _ in pair.inputs))
    if op in _NORMS:  # the mean is taken away: what it was large against the spread is lost
        spread = rms(frame, row) ** 2 - float(frame.numbers["mean"][row]) ** 2
        factor *= rms(frame, row) / math.sqrt(spread) if spread > 0 else 1.0
        if size:  # the mean itself, of what was normalised before: it is small against what it was taken of
            factor = max(factor, rms(frame, row) / size)
    return factor


def _update(frame: StepFrame, pair: Pair, carried: Sequence[float], own: float) -> float:
    """Return what an optimizer may make of gradients' noise: Adam steps by the learning rate, however small they are."""
    change = dict(zip((frame.text("slot", row) for row, _ in pair.inputs), carried, strict=True))
    row = pair.outputs[0][0]
    size, rate = rms(frame, row), _learning_rate(frame, pair)
    read = max((c for slot, c in change.items() if slot != "param"), default=0.0)
    if pair.a.op == "SGD":
        gradient = max((rms(frame, r) for r, _ in pair.inputs if frame.text("slot", r) == "grad"), default=0.0)
        turned = max(min(1.0, _FOLLOWS_GRADIENT * read) * _TURNED, _GRADIENTS * read) * rate * gradient
    else:  # a gradient that is rounding errors alone is turned into whole steps, and the statistics of the others hide it
        turned = _TURNED * rate if read else 0.0
    return _ROUNDED * own + _KEPT * change.get("param", 0.0) + (turned / size if size else math.inf)


def _learning_rate(frame: StepFrame, pair: Pair) -> float:
    settings = arguments(frame.text("args", pair.a.rows[0])).get("k", {})
    rate = settings.get("lr", _DEFAULT_RATE)
    return float(rate) if isinstance(rate, int | float) else _DEFAULT_RATE


def group_agrees(a: StepFrame, b: StepFrame, group: Group) -> bool:
    """Return whether two groups come to the same result: a fused operator and its parts."""
    rows_a, rows_b = group.a[-1].outputs, group.b[-1].outputs
    pairs = [(i, j) for i, j in zip(rows_a, rows_b, strict=False) if a.count[i] == b.count[j]]
    if not pairs:
        return False
    left, right = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
    coarse = max(roundoff(a.text("dtype", pairs[0][0])), roundoff(b.text("dtype", pairs[0][1])), 2.0**-24)
    return bool(changes(a, b, left, right)[0] <= min(_FUSED * coarse, _FUSED_MOST))
