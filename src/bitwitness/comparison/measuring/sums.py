"""Gradients that are sums of many numbers, as biases' and norms' are: how much of them rounding explains, perhaps all.

A bias before a batch norm, or before a softmax over positions, gets the sum of what comes back to its module's result, which
is zero in exact numbers. What rounding leaves of such a sum is relative to its terms, and not to other gradients (Higham,
"Accuracy and Stability of Numerical Algorithms", 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.allowance import rms

_LEFT = 32.0
"""Unit roundoffs of the root of the sum of the squared terms that count as nothing. Seen: 17, of a convolution in float32."""
_TERMS = 24.0
"""Times the same that a sum may differ by in two runs, whose terms were rounded several times. Seen: 9, of a layer norm."""
_MOST = 0.5  # of which the half is another gradient
_BIAS = "bias"


class GradientSums:
    """Knows what comes back to the results of modules.

    Parameters
    ----------
    a, b
        The two steps.
    pairs
        What is matched in them.

    """

    def __init__(self, a: StepFrame, b: StepFrame, pairs: Sequence[Pair]) -> None:
        self._frames = a, b
        self._back = {
            pair.a.module: pair.inputs[0]
            for pair in pairs
            if (pair.a.kind, pair.a.phase) == ("module", "backward") and pair.inputs
        }

    def come_to_nothing(self, pair: Pair, rounded: float) -> bool:
        """Return whether a gradient is a bias's and rounding errors alone in both runs; ``rounded``: a unit roundoff."""
        is_bias = pair.a.parameter.rpartition(".")[2] == _BIAS
        return is_bias and min(self._left(pair, pair.a.module, rounded), default=0.0) >= 1.0 / _LEFT

    def rounding_of(self, pair: Pair, rounded: float) -> float:
        """Return the relative change of a bias's or a norm's gradient that rounding of its terms explains; 0 of any other.

        Where a module's parameters are read by the one around it, that one's result is what comes back.
        """
        if len(self._frames[0].shapes[pair.outputs[0][0]]) != 1:
            return 0.0
        around = pair.a.module if pair.a.module in self._back else pair.a.module.rpartition(".")[0] or "."
        return min(_TERMS * min(self._left(pair, around, rounded), default=0.0), _MOST)

    def _left(self, pair: Pair, module: str, rounded: float) -> list[float]:
        """Return, of each run, what is left of a sum's rounded terms relative to it; nothing where no terms are known."""
        if pair.a.kind != "gradient" or module not in self._back:
            return []
        found = []
        for frame, row, back in zip(self._frames, pair.outputs[0], self._back[module], strict=True):
            terms, size = frame.count[back] / max(int(frame.count[row]), 1), rms(frame, row)
            if not math.isfinite(frame.numbers["l2"][row]):
                return []
            left = rounded * math.sqrt(terms) * rms(frame, back)
            found.append(left / size if size else math.inf)
        return found
