"""Biases' gradients that are sums of many numbers, of which nothing is left but rounding, where modules alone were recorded.

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
_BIAS = "bias"


class BiasSums:
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
        if pair.a.kind != "gradient" or pair.a.parameter.rpartition(".")[2] != _BIAS or pair.a.module not in self._back:
            return False
        return all(
            self._is_nothing(frame, row, back, rounded)
            for frame, row, back in zip(self._frames, pair.outputs[0], self._back[pair.a.module], strict=True)
        )

    @staticmethod
    def _is_nothing(frame: StepFrame, row: int, back: int, rounded: float) -> bool:
        terms = frame.count[back] / max(int(frame.count[row]), 1)
        return rms(frame, row) <= _LEFT * rounded * math.sqrt(terms) * rms(frame, back)
