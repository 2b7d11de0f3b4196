"""Weights that are nothing beside the others: what rounding errors alone have made of a bias that began at zero.

A key's bias moves all scores of a query alike, which a softmax does not see: its gradient is what rounding leaves of zero.
Where a script updates its weights itself, no optimizer is recorded that would say so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitwitness.comparison.align import Pair
from bitwitness.comparison.allowance import rms, roundoff
from bitwitness.comparison.frame import StepFrame
from bitwitness.comparison.relation import not_finite


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
