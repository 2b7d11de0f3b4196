"""Gradients and weights that are nothing beside the others: what rounding errors alone have made of zero.

A key's bias moves all scores of a query alike, which a softmax does not see: its gradient is what rounding leaves of zero.
Where a script updates its weights itself, no optimizer is recorded that would say so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.allowance import rms, roundoff
from bitwitness.comparison.measuring.relation import not_finite

_CANCELLED, _CANCELLED_MOST = 512.0, 1e-3
"""Unit roundoffs, and at most which share, of the usual gradient up to which one may be rounding errors alone. Seen in float32:
1e-10 of a key's bias, 2e-6 of one before a batch norm; 2e-4 of a query's weight that had one, in a BERT."""


_NOT_SET = {"_ctc_loss": "out1", "_ctc_loss_backward": "in6"}
"""The slots of values of which torch sets a part: CTC's sums over paths, beyond each target's length."""
_COARSELY = 64.0
"""Unit roundoffs of the coarser dtype, of the usual gradient, that are rounding errors alone there."""


def nothing_of(usual: float, rounded: float) -> float:
    """Return the size up to which a gradient may be rounding errors alone; ``rounded``: a unit roundoff."""
    return min(_CANCELLED * rounded, _CANCELLED_MOST) * usual


def vanish(sizes: tuple[float, float], usual: float, rounded: float, dtypes: tuple[str, str]) -> bool:
    """Return whether a gradient may be rounding errors alone in both runs.

    Where that of the run with the finer precision is nothing at all, the other's may be some times as large as what its dtype
    rounds the usual gradient by: 3e-3 was seen in bfloat16, of a convolution's bias before a batch norm, 7e-3 of a mixer's,
    0.17 of a norm's bias before a softmax over positions. ``dtypes``: what the runs compute in.
    """
    precisions = [roundoff(dtype) for dtype in dtypes]
    finer = int(precisions[1] < precisions[0])
    fine, coarse = sizes[finer], sizes[1 - finer]
    return max(sizes) < nothing_of(usual, rounded) or (
        coarse < _COARSELY * max(precisions) * usual and fine < nothing_of(usual, roundoff("float32"))
    )


def faint_rows(a: StepFrame, b: StepFrame, pairs: Sequence[Pair]) -> list[int]:
    """Return the rows, in A, of weights that are smaller in both runs than what the usual weight is rounded by.

    What an optimizer reads and writes is not among them: it is held against its own inputs.
    """
    weights = [pair.outputs[0] for pair in pairs if pair.a.kind == "parameter" and pair.outputs]
    usual = float(np.median([rms(a, i) for i, _ in weights])) if weights else 0.0
    small = [(i, j) for i, j in weights if max(rms(a, i), rms(b, j)) < roundoff(a.text("dtype", i)) * usual]
    faint = {int(a.value[i]) for i, j in small if not not_finite(a, b, i, j)}
    if not faint:
        return []
    read = (row for pair in pairs if pair.a.kind != "optimizer" for row, _ in (*pair.inputs, *pair.outputs))
    return [row for row in read if int(a.value[row]) in faint]


def sparse_in_one(a: StepFrame, b: StepFrame, pairs: Sequence[Pair]) -> list[int]:
    """Return the rows, in A, of gradients that are sparse in one run alone, of which the stored values were recorded.

    These say nothing of a dense one: an index may stand there twice. What the optimizer makes of it does.
    """
    sizes = {pair.a.parameter: int(a.count[pair.outputs[0][0]]) for pair in pairs if pair.a.kind == "parameter"}
    found = []
    for pair in pairs:
        name = pair.a.parameter if pair.a.kind == "gradient" else pair.a.module
        for i, j in pair.inputs if pair.a.kind == "optimizer" else pair.outputs if pair.a.kind == "gradient" else ():
            is_gradient = pair.a.kind == "gradient" or a.text("slot", i) == "grad"
            if is_gradient and sizes.get(name, 0) in (a.count[i], b.count[j]) and _has_other_rows(a, i, b, j):
                found.append(i)
        if (pair.a.kind, pair.a.phase) == ("op", "backward") and "embedding" in pair.a.op:
            found += [i for i, j in pair.outputs if _has_other_rows(a, i, b, j)]
    return found


def _has_other_rows(a: StepFrame, row_a: int, b: StepFrame, row_b: int) -> bool:
    sparse = [frame.text("layout", row).startswith("sparse") for frame, row in ((a, row_a), (b, row_b))]
    other = bool(a.count[row_a] != b.count[row_b]) or sparse[0] != sparse[1]
    return other and a.shapes[row_a][1:] == b.shapes[row_b][1:]


def not_set(a: StepFrame, pairs: Sequence[Pair]) -> list[int]:
    """Return the rows, in A, of results that torch leaves partly as the memory was, and of what reads them."""
    rows = [row for pair in pairs if pair.a.op in _NOT_SET for row, _ in (*pair.inputs, *pair.outputs)]
    return [row for row in rows if a.text("slot", row) == _NOT_SET[a.text("op", row)]]
