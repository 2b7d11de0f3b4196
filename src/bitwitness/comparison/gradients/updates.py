"""Why gradients and updates differ: what happened to all of them, an edit of one, or no gradient in one run."""

from __future__ import annotations

import math
from functools import cached_property
from statistics import median

from bitwitness.comparison.differences import FINE, FOLLOWED, Differences
from bitwitness.comparison.gradients.absent import NOT_THERE, let_go
from bitwitness.comparison.gradients.causes import GradientChains
from bitwitness.comparison.gradients.decayed import decayed_by_hand
from bitwitness.comparison.gradients.ownranks import CHANGES_ITS_OWN, changed_before
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.measuring.describe import RECORD_OPERATORS
from bitwitness.comparison.measuring.relation import and_so, in_words, in_words_of_link
from bitwitness.comparison.reasons.inputs import Reasons
from bitwitness.comparison.reasons.reason import Reason
from bitwitness.comparison.rewriting.settled import SettledModules

_GRADIENT = 1e-3
"""Relative change by which a gradient of which nothing else is known may differ.

Far above rounding in float32, for nothing is known of how many operators' roundings it has gathered.
"""
_BESIDE = "in another model of the process, perhaps, whose recording lies beside (RUN-2), or in compiled code"
_UNTRACED = 0.01
"""The same of one whose way to the optimizer is not known: a reduction in a coarse dtype leaves less, too."""
_COARSE = 40.0
"""The same as unit roundoffs of the coarser precision, where two runs compute in different ones."""
_LIKE_OTHERS, _LIKE_OTHERS_MOST = 8.0, 0.7
"""There, too: times what half of the step's gradients stay within, and up to where; how rounding grows along a depth that was
not recorded is seen in all gradients alike."""
_REWRITTEN = 0.05
"""The most that the same mathematics, written otherwise and computed in a coarse dtype, may change a gradient by."""


class Updates:
    """Finds the reasons of values that nothing recorded was computed from, and of what optimizers read.

    Parameters
    ----------
    differences, reasons, settled
        Of the step.

    Attributes
    ----------
    cause
        What happened to all gradients at once; None if no one thing did.

    """

    def __init__(self, differences: Differences, reasons: Reasons, settled: SettledModules) -> None:
        self._differences = differences
        self._reasons = reasons
        self._settled = settled
        self._chains = GradientChains(differences)
        self._chain_of = {chain.name: chain for chain in self._chains.chains}
        self.cause = self._chains.cause()
        self.turned = 0.0
        """By how much at the most a gradient differs of which rounding turned few elements: those behind it follow."""

    def limit(self, pair: Pair) -> float:
        """Return the change up to which a value that stands alone may differ: noise, and what its maker handed on."""
        differences = self._differences
        if pair.is_loss and self._begins_otherwise:
            return differences.noise_limit()
        made = differences.made_change(pair.outputs[0][0])
        noisy = pair.a.kind == "gradient" and differences.earlier.noise and not differences.has_operators
        summed = self._of_noise(pair) if noisy else 0.0
        return max(self._unseen(*pair.outputs[0]), FOLLOWED * made, self._of_precision, summed)

    def _of_noise(self, pair: Pair) -> float:
        """Return the change of a gradient that noise explains where both runs compute in a coarse dtype that is cast inside."""
        coarse = self._differences.coarse
        rounded = min(_COARSE * coarse, _REWRITTEN) if coarse > FINE else 0.0
        return max(rounded, self._differences.sums.rounding_of(pair, coarse))

    def _unseen(self, row_a: int, row_b: int) -> float:
        """Return the change up to which a gradient may differ of which nothing else is known."""
        own = 0.0 if self._differences.has_operators else self._differences.roundoff(row_a, row_b)
        modules = min(_COARSE * own, _REWRITTEN) if own > FINE else 0.0  # nobody knows how they are written
        return max(_GRADIENT, self._differences.noise_limit(), modules, FOLLOWED * self.turned)

    @cached_property
    def _like_others(self) -> float:
        """What a gradient may differ by as half of the step's do."""
        pairs = [pair for pair in self._differences.alignment.pairs if pair.a.kind == "gradient" and pair.outputs]
        changes = [self._differences.change_of[pair.outputs[0][0]] for pair in pairs]
        return min(_LIKE_OTHERS * median(changes), _LIKE_OTHERS_MOST) if changes else 0.0

    @cached_property
    def _of_precision(self) -> float:
        """What gradients may differ by where the runs compute in different precisions; 0 where in the same."""
        differences = self._differences
        if not differences.roundoff_inside:
            return min(_COARSE * differences.rewritten, _REWRITTEN)
        if differences.precisions and not differences.has_operators and differences.earlier.last is not None:
            return math.inf  # by how much weights that rounding moved apart turn gradients, modules alone do not show
        like_others = self._like_others if differences.roundoff_inside > FINE else 0.0
        return max(_COARSE * differences.roundoff_inside, like_others)

    @cached_property
    def _begins_otherwise(self) -> bool:
        """Whether what modules return agrees, and the gradient that comes back to the model does not, which nobody saw made."""
        differences = self._differences
        if differences.precisions or not self._settled.returned_agrees:
            return False
        back = [rows for pair in differences.alignment.pairs if pair.is_root("backward") for rows in pair.inputs]
        unmade = [rows for rows in back if differences.a.producer[rows[0]] < 0]
        return any(differences.change_of[rows[0]] > self._unseen(*rows) for rows in unmade)

    def edited_elsewhere(self, pair: Pair) -> bool:
        """Return whether a gradient was only edited at another place (by hand, by a clipping function) to the same end."""
        name = pair.a.parameter if pair.a.kind == "gradient" else ""
        chain = self._chain_of.get(name)
        return chain is not None and (
            self._chains.edited_elsewhere(chain) or (name in self._decayed and self._chains.left_alike(chain))
        )

    @cached_property
    def _decayed(self) -> set[str]:
        return decayed_by_hand(self._differences)

    def of_value(self, pair: Pair) -> Reason | None:
        """Return why a gradient differs by more than its `limit`; None for other values, and where all gradients do."""
        row_a, row_b = pair.outputs[0]
        if any(self._differences.makers.lone(row_a, row_b)):
            return self._reasons.of_lone(pair, row_a, row_b)
        if pair.a.kind != "gradient":
            return self._of_loss(pair)
        return self._edited(pair.a.parameter) or self._reasons.of_value(row_a, row_b)

    def _of_loss(self, pair: Pair) -> Reason | None:
        """Return that a loss is computed otherwise of what the modules return, where that agrees and no operators tell."""
        differences = self._differences
        told = differences.has_operators and max(differences.a.producer[row] for row, _ in pair.outputs) >= 0
        if not pair.is_loss or self.cause is not None or told or not self._settled.returned_agrees:
            return None
        words = in_words(differences.a, differences.b, *pair.outputs[0])
        unseen = _BESIDE if differences.has_operators else RECORD_OPERATORS
        why = f"it is computed otherwise, or of other targets: {unseen}"
        return Reason("loss", f"the loss differs ({words}), and what the modules return agrees: {why}")

    def of_update(self, pair: Pair) -> Reason | None:
        """Return what an update is to blame on its gradient for: one run lacks it, or has edited it after the backward."""
        frames = ((self._differences.a, pair.a), (self._differences.b, pair.b))
        first, second = ("grad" in {frame.text("slot", row) for row in node.inputs} for frame, node in frames)
        if first != second:
            have, lack = ("A", "B") if first else ("B", "A")
            why = let_go(lack) if pair.a.module in self._chain_of else NOT_THERE.format(lack)
            return Reason("missing", f"only run {have} has a gradient of it: {why}")
        if not self._differences.earlier.parted and (written := self._reasons.of_moved(pair)):
            return written
        if self.cause is not None or self._differences.earlier.parted or pair.a.module in self._decayed:
            return None
        read = [rows for rows in pair.inputs if self._differences.a.text("slot", rows[0]) == "grad"]
        differs = max((self._differences.change_of[row] for row, _ in read), default=0.0)
        if pair.a.module not in self._chain_of and differs > max(
            _UNTRACED, self._differences.drifted, self._of_precision
        ):
            return self._untraced(pair, read[0])
        return self._edited(pair.a.module) if differs > _GRADIENT and not self._differences.is_cancelled(pair) else None

    def of_vain_edit(self, pair: Pair) -> Reason | None:
        """Return that the gradient was edited in one run that an optimizer reads, though its update does not show it as yet."""
        decayed = pair.a.module in self._decayed or self._differences.is_cancelled(pair)
        if pair.a.kind != "optimizer" or self.cause is not None or self._differences.earlier.parted or decayed:
            return None
        read = [row for row, _ in pair.inputs if self._differences.a.text("slot", row) == "grad"]
        differs = max((self._differences.change_of[row] for row in read), default=0.0)
        found = self._edited(pair.a.module) if differs > max(_GRADIENT, self._of_precision) else None
        return found and Reason(
            found.kind, f"{found.text}; the update is the same (as of an optimizer that looks at signs)"
        )

    def _untraced(self, pair: Pair, rows: tuple[int, int]) -> Reason | None:
        """Return that a gradient differs of which no more is known than that the optimizer reads it."""
        if self._differences.is_cancelled(pair):
            return None
        frames = self._differences.a, self._differences.b
        names = pair.a.module, pair.b.module
        sides = [side for side, frame, name in zip("AB", frames, names, strict=True) if changed_before(frame, name)]
        why = (
            f", and in run {' and in run '.join(sides)} each rank changes its own {CHANGES_ITS_OWN}"
            if sides
            else ", and what it was before is not recorded in both runs"
        )
        return Reason("edited", f"the gradient that it reads differs ({in_words(*frames, *rows)}){why}")

    def _edited(self, name: str) -> Reason | None:
        """Return that a gradient was edited between backward and step, if it was, and otherwise in each run."""
        chain = self._chain_of.get(name)
        links = None if chain is None else self._chains.edited(chain)
        if links is None:
            return None
        how = _in_words(links)
        text = f"the gradient of {name} was changed between the backward and the step: {how}"
        others = [one for other in self._chains.chains if other is not chain and (one := self._chains.edited(other))]
        return Reason("edited", text + and_so([_in_words(one) for one in others].count(how)))


def _in_words(links: tuple[float | None, float | None]) -> str:
    return "; ".join(f"run {side} {in_words_of_link(link)}" for side, link in zip("AB", links, strict=True))
