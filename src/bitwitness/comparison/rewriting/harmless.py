"""Which suspects are ways of writing: nothing is left of them in what a module returns, or in what they lead to."""

from __future__ import annotations

import re

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.unscaled import has_other_arguments, multiplies_one_number
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.precisions.otherwise import computing
from bitwitness.comparison.rewriting.effects import Effects
from bitwitness.comparison.rewriting.inside import APART
from bitwitness.comparison.rewriting.outcome import leaves_nothing_of, of_gradients
from bitwitness.comparison.rewriting.settled import SettledModules
from bitwitness.comparison.suspect import Suspect
from bitwitness.oracle.names import canonical

_HARMLESS = ("missing", "computed", "unknown", "view")
"""Reasons that do not matter where nothing is left of a difference."""
_WRITTEN = ("argument", "missing", "unknown", "view")
"""Those that are ways of writing where nothing is left of them in losses and gradients."""
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

_LOSSES = ("log_softmax", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits")
"""Operators that a loss is computed by, whose dtype is the script's choice: of logits that were widened, or not."""

_OTHER_DIMENSION = re.compile(r": dim \S+ against \S+$")
_NUMBERS = re.compile(r": \w+ (-?[\d.]+(?:e[+-]?\d+)?) against (-?[\d.]+(?:e[+-]?\d+)?)$")
_LARGE = 0.05
"""Relative change that no rounding would hide in what is made of it."""
_FILLING = 1e3
"""Magnitude of numbers by which what is masked is multiplied."""


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
        self._effects = Effects(differences, settled.agree)
        self.ends: set[int] = set()
        self._other_dtypes: dict[str, Suspect] = {}

    def holds(self, pair: Pair, suspect: Suspect) -> bool:
        """Return whether nothing is left of a suspect that says nothing that stands by itself."""
        # One run may be more exact in some operators than both are in their products, but not in what losses are made of.
        loss = pair.a.kind == "op" and canonical(pair.a.op) in _LOSSES and self._differences.precisions is None
        exact = suspect.reason == "dtype" and self._differences.rewritten > 0.0 and not loss
        if self._is_elsewhere(pair, suspect) and self._has_no_effect(pair, suspect):
            return True
        forward = (pair.a.kind, pair.a.phase) == ("op", "forward")
        large = suspect.reason in ("missing", "view") and suspect.change >= _LARGE
        if forward and large and self._settled.loss_is_the_same:
            return True
        if suspect.reason == "dtype" and self._is_finer(pair) and suspect.change <= suspect.explained:
            return True  # float64 for float32, which shows in nothing else
        if pair.a.kind == "gradient" and suspect.reason == "unknown" and self._settled.turns(pair):
            return True
        if (
            suspect.reason == "edited" and pair.a.phase == "backward"
        ):  # reduced between two micro-batches, or behind the last
            return leaves_nothing_of(suspect.change, of_gradients(self._differences))
        if suspect.reason == "argument" and self._is_scale(pair):
            return True
        if pair.a.kind == "op" and suspect.reason in _WRITTEN and self._settled.leave_nothing_of(suspect.change):
            return True
        if not (
            suspect.reason in _HARMLESS or exact or (suspect.reason == "argument" and self._is_written(pair, suspect))
        ):
            return False
        # What was computed wrongly may be too small for what follows to show it.
        settled = self._settled.holds(pair) and not self._is_kept(pair, suspect)
        nothing = settled or (suspect.reason != "computed" and self._has_no_effect(pair, suspect))
        if nothing and suspect.reason == "dtype":
            self._other_dtypes.setdefault(pair.a.module, suspect)
        return nothing

    def behind(self, pair: Pair, suspect: Suspect) -> Suspect:
        """Return what a suspect of a backward comes of, if its module's forward computes in another dtype in each run.

        Of that nothing was left in what the module returns; but gradients gather more of its rounding.
        """
        return self._other_dtypes.get(pair.a.module, suspect) if pair.a.phase == "backward" else suspect

    def _is_finer(self, pair: Pair) -> bool:
        pairs = (self._differences.dtypes(*rows) for rows in (*pair.inputs, *pair.outputs))
        dtypes = {dtype.removeprefix("torch.") for found in pairs for dtype in found if "float" in dtype}
        return dtypes <= {"float32", "float64"}

    def _is_scale(self, pair: Pair) -> bool:
        """Return whether a single number is multiplied by what was found to be a scale of the loss, and taken out."""
        return self._differences.b.factors is not None and multiplies_one_number(self._differences.a, pair.a)

    def _is_written(self, pair: Pair, suspect: Suspect) -> bool:
        """Return whether other arguments may be a way of writing.

        Those of something else (a sum over other dimensions) may, and so may those of a backward: they follow from what the
        forward is written in. A loss that is summed may be divided by what follows, and so may any number be that something
        is multiplied by, where there is something else that makes up for it; and memory to work on may have any shape.
        """
        a, b = self._differences.a, self._differences.b
        other = any(a.shapes[i] != b.shapes[j] for i, j in pair.inputs)
        op = canonical(pair.a.op) if pair.a.kind == "op" else ""
        means = op in _FILLED or (op in _ARITHMETIC and (self._is_made_up_for(pair) or _fills(suspect.text)))
        along = _OTHER_DIMENSION.search(suspect.text) is not None
        return other or means or along or pair.a.phase == "backward" or "reduction '" in suspect.text

    def _is_elsewhere(self, pair: Pair, suspect: Suspect) -> bool:
        """Return whether a result is so different that it would show if anything of it mattered, by a way of writing.

        Positions that are counted from another number, or the rows of a batch in another order, may be such; a running
        statistic is kept, whoever reads it.
        """
        written = suspect.reason == "argument" and canonical(pair.a.op) in _ARITHMETIC
        others = suspect.reason == "computed" and pair.a.kind == "module" and APART in suspect.text
        aside = suspect.lone is None and not self._is_kept(pair, suspect)
        return aside and (written or others) and suspect.change >= _LARGE

    def _is_kept(self, pair: Pair, suspect: Suspect) -> bool:
        """Return whether a result is a running statistic."""
        slot = self._differences.a.text("slot", pair.outputs[0][0]) if pair.outputs else ""
        return suspect.site.rpartition(".")[2].startswith("running") or slot.startswith("running")

    def _is_made_up_for(self, pair: Pair) -> bool:
        """Return whether something else is written otherwise in a node's module, or in the one around it."""
        around = {pair.a.module, pair.a.module.rpartition(".")[0] or "."}
        alignment = self._differences.alignment
        lone = [node for first in (True, False) for node in alignment.lone(first=first) if node.kind == "op"]
        if any(node.phase == pair.a.phase and node.module in around for node in computing(lone)):
            return True
        others = (one for one in alignment.pairs if one.a.kind == "op" and one.a.module in around and one is not pair)
        return any(
            one.a.phase == pair.a.phase
            and canonical(one.a.op) in _ARITHMETIC
            and has_other_arguments(self._differences, one)
            for one in others
        )

    def _has_no_effect(self, pair: Pair, suspect: Suspect) -> bool:
        sides = [(pair.a, True), (pair.b, False)] if suspect.lone is None else [(suspect.lone, suspect.side == "a")]
        for node, first in sides:
            ends = self._effects.end(node, first=first)
            if ends is None:
                return False
            self.ends |= ends
        return True


def _fills(text: str) -> bool:
    """Return whether an argument is as large in both runs as what masks are filled with."""
    found = _NUMBERS.search(text)
    return found is not None and all(abs(float(one)) >= _FILLING for one in found.groups())
