"""Which suspects are ways of writing: nothing is left of them in what a module returns, or in what they lead to."""

from __future__ import annotations

from bitwitness.comparison.align import Pair
from bitwitness.comparison.differences import Differences
from bitwitness.comparison.effects import Effects
from bitwitness.comparison.settled import SettledModules
from bitwitness.comparison.suspect import Suspect
from bitwitness.oracle.names import canonical

_HARMLESS = ("missing", "computed", "unknown", "view")
"""Reasons that do not matter where nothing is left of a difference."""
_ARITHMETIC = ("add", "div", "mul", "sub")
_FILLED = (
    "arange",
    "empty",
    "full",
    "masked_fill",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones",
    "scalar_tensor",
    "zeros",
)
"""Operators that make something to work on, or fill what is masked: a softmax makes as much of minus infinity as of -1e9."""


class Harmless:
    """Judges the suspects of one step of one rank.

    Parameters
    ----------
    differences, settled
        The step, and its modules whose results agree.

    Attributes
    ----------
    ends
        Numbers, in A, of nodes whose results agree though they read what a harmless suspect made.

    """

    def __init__(self, differences: Differences, settled: SettledModules) -> None:
        self._differences = differences
        self._settled = settled
        self._effects = Effects(differences, settled.agrees)
        self.ends: set[int] = set()

    def holds(self, pair: Pair, suspect: Suspect) -> bool:
        """Return whether nothing is left of a suspect that says nothing that stands by itself."""
        # One run may be more exact in some operators than both are in their products.
        exact = suspect.reason == "dtype" and self._differences.rewritten > 0.0
        if not (
            suspect.reason in _HARMLESS or exact or (suspect.reason == "argument" and self._is_written(pair, suspect))
        ):
            return False
        # What was computed wrongly may be too small for what follows to show it.
        return self._settled.holds(pair) or (suspect.reason != "computed" and self._has_no_effect(pair, suspect))

    def _is_written(self, pair: Pair, suspect: Suspect) -> bool:
        """Return whether other arguments may be a way of writing.

        Those of something else (a sum over other dimensions) may, and so may those of a backward: they follow from what the
        forward is written in. A loss that is summed may be divided by what follows, and so may any number be that something
        is multiplied by; and memory to work on may have any shape.
        """
        a, b = self._differences.a, self._differences.b
        other = any(a.shapes[i] != b.shapes[j] for i, j in pair.inputs)
        means = pair.a.kind == "op" and canonical(pair.a.op) in (*_ARITHMETIC, *_FILLED)
        return other or means or pair.a.phase == "backward" or "reduction '" in suspect.text

    def _has_no_effect(self, pair: Pair, suspect: Suspect) -> bool:
        sides = [(pair.a, True), (pair.b, False)] if suspect.lone is None else [(suspect.lone, suspect.side == "a")]
        for node, first in sides:
            ends = self._effects.end(node, first=first)
            if ends is None:
                return False
            self.ends |= ends
        return True
