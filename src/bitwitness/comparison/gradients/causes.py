"""What happened to all gradients at once: a factor, a clipping, a step whose gradients were not zeroed.

A parameter's gradient is recorded up to three times: as the backward left it (``local``), complete and reduced
(``reduced``), and as the optimizer read it. Where run B's are all one number times run A's, the cause is one and no
operator's, and it lies before the first of the three that shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bitwitness.comparison.gradients.cause import SOME_FACTOR, Cause
from bitwitness.comparison.gradients.chains import (
    STAGES,
    Chain,
    are_one_clipping,
    clipped_at,
    in_words_of_change,
    is_read_alike,
    norms_since,
    row_at,
)
from bitwitness.comparison.gradients.dropped import last_alone
from bitwitness.comparison.gradients.factors import COARSE, SMALL, GradientFactors
from bitwitness.comparison.gradients.late import scaled_within
from bitwitness.comparison.gradients.losses import loss_ratio
from bitwitness.comparison.gradients.notfinite import not_finite_in_one
from bitwitness.comparison.gradients.scalers import is_power_of_two, multiplied_by_scalers
from bitwitness.comparison.gradients.underflow import too_small
from bitwitness.comparison.gradients.unzeroed import not_zeroed
from bitwitness.comparison.gradients.weighed import weigh_otherwise
from bitwitness.comparison.measuring.relation import factor, in_times

_OF_REDUCTION = (
    "a sum for a mean, another number of ranks, a mean taken twice, ranks that send zeros, or a factor behind it"
)
_OF_ZERO = (
    "ranks that send zeros, a clipping whose norm is not finite, or a script that writes zeros behind the backward"
)
_OF_SHARDED = "a sum over ranks for a mean, or another divisor: sharded gradients are reduced within the backward"
_MOST_SCALED = 0.75
"""The same of a loss scale: without one, the small gradients of some are not float16's any more."""
_MOST_DRIFTED = 0.05
"""How far from one factor, at most, what has moved the weights apart may bring a later step's gradients."""
_APART, _NAMED = 0.02, 3
"""Relative deviation of a gradient's own factor that is another one, and how many of such are named."""


class GradientChains(GradientFactors):
    """Finds what explains how all gradients of one step of one rank differ; made as `GradientFactors` is."""

    def cause(self) -> Cause | None:
        """Return what explains how all gradients differ, if one thing does."""
        if len(self._weighty) < 2 or self._differences.parted_before:
            return None
        if (bad := not_finite_in_one(self._a, self._b, self.chains)) is not None:
            return None if bad.by_backward else Cause("nonfinite", STAGES[2], bad.text, self._row(2), math.nan)
        ratios = [self._common([(c.a[stage], c.b[stage]) for c in self._weighty]) for stage in range(len(STAGES))]
        if ratios[0] is not None and not self._is_one(ratios[0]):
            return self._from_backward(ratios[0])
        for kind, told in (("underflow", too_small), ("dropped", last_alone), ("kept", not_zeroed)):
            if text := told(self._differences, self._weighty):
                return Cause(kind, STAGES[0], text, self._row(0), math.nan)
        # Without a reduction it is the script's affair when it clips: what the optimizers read tells.
        for stage in (1, 2) if self._is_reduced else ():
            ratio, before = ratios[stage], ratios[stage - 1]
            if ratio is not None and before is not None and not self._is_one(ratio / before if before else ratio):
                return self._between(stage, ratio)
        x, y = self._usual
        if self._is_one(y / x):
            return self._weighed()
        if self._edits_some:
            return None  # which are told one by one
        return self._between(2, math.nan if ratios[2] is None and None in self.multiplied else y / x)

    def scaled_back(self) -> float | None:
        """Return how many times run B's loss scale is A's, which optimizers do not see; None where it is the same."""
        if len(self._weighty) < 2 or self._differences.parted_before:
            return None
        # Numbers that float16 holds with fewer digits, being small, are rounded otherwise under another scale.
        rounded = max(self._differences.coarse, self._differences.roundoff_inside)
        noise = max(COARSE * rounded, min(self._differences.drifted, _MOST_DRIFTED))
        ends = ([(c.a[s], c.b[s]) for c in self._weighty] for s in (0, 2))
        first, last = (self._common(rows, least=noise, most=_MOST_SCALED) for rows in ends)
        if first is None or last is None or first <= 0 or self._is_one(first, noise) or not self._is_one(last, noise):
            return None
        # Of gradients that are clipped in both runs the size says nothing of what was done to the loss. Scales are powers of 2,
        # and leave all bits alike when taken out; a clipping's factor (of the norm plus an epsilon) is another for each scale.
        x, y = self._usual
        unscales = self._is_one(x) or is_power_of_two(x) or self._takes_out(first)
        return first if unscales and self._is_one(y * first / x, noise) else None

    def _takes_out(self, scale: float) -> bool:
        alike = is_power_of_two(scale) and all(is_read_alike(self._a, self._b, chain) for chain in self.chains)
        return alike or multiplied_by_scalers(self._differences, scale, self._is_one)

    # -- causes --------------------------------------------------------------------------------------------------

    def _row(self, stage: int) -> int:
        return min(row for chain in self.chains if (row := row_at(chain.a, stage)) is not None)

    def _every(self, ratio: float, stage: int) -> str:
        if math.isnan(ratio):
            return f"gradients ({len(self.chains)} parameters) differ, by no one factor,"
        how = "has the other sign" if self._is_one(-ratio) else f"is {in_times(ratio)} as large" if ratio else "is zero"
        others = [chain.name for chain in self._weighty if self._is_apart(chain, ratio, stage)]
        if not others:
            return f"every gradient ({len(self.chains)} parameters) {how} in run B"
        named = ", ".join(others[:_NAMED]) + ", …" * (len(others) > _NAMED)
        return f"every gradient but {len(others)} of {len(self.chains)} ({named}) {how} in run B"

    def _is_apart(self, chain: Chain, ratio: float, stage: int) -> bool:
        """Return whether a gradient is known to have another factor than most have."""
        i, j = row_at(chain.a, stage), row_at(chain.b, stage)
        own = None if i is None or j is None else factor(self._a, i, self._b, j, self._noise)
        return own is not None and (abs(own - ratio) > _APART * abs(ratio) or self._is_one(own))

    def _from_backward(self, ratio: float) -> Cause:
        said = f"{self._every(ratio, 0)}, from the backward on"
        loss = loss_ratio(self._differences)
        micros = self._a.micros, self._b.micros
        ranks = self._a.ranks, self._b.ranks
        kept = loss is not None and self._is_one(loss)  # losses are divided, then, where micro-batches' are added up
        by_ranks = ranks[0] != ranks[1] and self._is_one(ratio * ranks[0] / ranks[1])
        if micros[0] != micros[1] and self._is_one(ratio * micros[0] / micros[1]) and not (by_ranks and kept):
            counts = f"{micros[0]} against {micros[1]}"
            why = f"as many times as micro-batches ({counts}): their losses are not divided by that number"
        elif by_ranks and (loss is None or kept):
            said = f"{self._every(ratio, 1)}, from the reduction over ranks on"
            why = f"as many times as ranks ({ranks[0]} against {ranks[1]}): their gradients are added up, and not averaged"
        elif loss is not None and abs(loss - ratio) <= self._limit() * abs(ratio):
            why = "so is the loss that the backward starts from: a loss scale, an accumulation divisor, or a sum for a mean"
        elif self._is_one(-ratio):
            why = "the loss is to be lowered in one run, and raised in the other"
        elif kept and (within := scaled_within(self._differences, [chain.name for chain in self._weighty])):
            where = _OF_SHARDED if self._are_sharded else "a factor in there, of what is zero as yet"
            why = f"the loss agrees, and so does what comes back to {within}: {where}"
        else:
            why = SOME_FACTOR
        return Cause("scaled", STAGES[0], f"{said}: {why}", self._row(0), ratio)

    @property
    def _are_sharded(self) -> bool:
        """Whether the gradients are of one rank's shards in both runs: reduced by what is recorded of them first."""
        first = self._weighty[0]
        sides = [(self._a, row_at(first.a, 1)), (self._b, row_at(first.b, 1))]
        return all(row is not None and "S" in frame.text("placement", row).partition(" of ")[0] for frame, row in sides)

    def _between(self, stage: int, ratio: float) -> Cause | None:
        since = stage - 1 if self._is_reduced else 0
        sides = [(self._a, [c.a for c in self._weighty]), (self._b, [c.b for c in self._weighty])]
        own = [self._common([(rows[since], row_at(rows, stage)) for rows in of], frame) for frame, of in sides]
        if STAGES[stage] == "reduced" and self._is_reduced:
            return self._by_reduction(own, ratio)
        if self._is_reduced and all(one is not None and self._is_one(one) for one in own):
            return self._between(1, ratio)  # nothing happens behind it
        sides = [(self._a, [c.a for c in self.chains]), (self._b, [c.b for c in self.chains])]
        norms = [norms_since(frame, chains, since)[1] for frame, chains in sides]
        before = self._common([(c.a[0], c.b[0]) for c in self._weighty])
        if are_one_clipping(own, norms, self._limit(), differ=before is None):
            return None
        tops = [clipped_at(frame, chains) for frame, chains in sides]
        how = "; ".join(
            f"run {side} {in_words_of_change(top, 1.0 if one and self._is_one(one) else one, *of, since)}"
            for one, side, top, of in zip(own, "AB", tops, sides, strict=True)
        )
        clips = any(tops) or any(one is not None and 0 < one < 1 - self._limit() for one in own)
        what = "clipping, or a scale" if clips else "a scale"
        text = f"{self._as_read(ratio, before)}: {what} in between ({how})"
        return Cause("clipped" if clips else "scaled", STAGES[stage], text, self._row(stage), ratio)

    def _by_reduction(self, own: Sequence[float | None], ratio: float) -> Cause:
        known = [f"by {one:.4g} in run {side}" for one, side in zip(own, "AB", strict=True) if one is not None]
        how = f", which multiplies them {' and '.join(known)}" if known else ""
        why = _OF_ZERO if ratio == 0.0 or not all(one is None or one for one in own) else _OF_REDUCTION
        text = f"{self._every(ratio, 1).rstrip(',')}, from the reduction over ranks on{how}: {why}"
        return Cause("scaled", STAGES[1], text, self._row(1), ratio)

    def _as_read(self, ratio: float, left: float | None) -> str:
        """Say how gradients differ when the optimizer reads them; ``ratio``: by what, unless they differ before, anyway."""
        if self._common([(c.a[2], c.b[2]) for c in self._weighty]) is None and not math.isnan(ratio):
            return f"gradients ({len(self.chains)} parameters) are multiplied by another number before the optimizer reads them"
        it = "them" if math.isnan(ratio) else "it"
        before = "" if left is None else f", and not when the backward leaves {it}"
        return f"{self._every(ratio, 2)} when the optimizer reads {it}{before}"

    def _weighed(self) -> Cause | None:
        """Return that micro-batches or ranks weigh otherwise, or that the losses are not one function."""
        rows = [chain.a[1] for chain in self._weighty]
        one = weigh_otherwise(self._differences, rows, max(SMALL, self._noise))
        return one and Cause(one.kind, STAGES[0], one.text, self._row(0), math.nan, one.side, one.stack)
