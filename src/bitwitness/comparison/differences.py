"""How far apart the matched rows of two steps are, and which of these differences are more than rounding noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from bitwitness.comparison.matching.align import Alignment, Pair
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.matching.makers import Makers
from bitwitness.comparison.matching.tokens import CASTS
from bitwitness.comparison.measuring.allowance import rms, roundoff
from bitwitness.comparison.measuring.changes import changes
from bitwitness.comparison.measuring.drift import COARSE, drift
from bitwitness.comparison.measuring.faint import faint_rows, not_set, nothing_of, sparse_in_one, vanish
from bitwitness.comparison.measuring.sums import GradientSums
from bitwitness.comparison.precisions.which import computed_in, multiplies
from bitwitness.comparison.suspect import EarlierSteps
from bitwitness.oracle.names import CONSTANT

NEGLIGIBLE = 1e-6
"""Relative change by which statistics of equal numbers may differ, taken by another number of threads."""
FINE = 2.0**-20
"""Unit roundoff up to which rounding leaves no gradient of float32 a thousandth off, whatever the depth; TF32's is 2**-11."""
_LATER = 4.0
"""In steps after the first, in different precisions: 1.7 and 1.4 were seen in a Llama and a ResNet at a rate of 1e-3."""
VIEWED = 100.0
"""Times the noise by which a value may differ that is taken from one within it.

A view or slice may hold the few elements of a large tensor that differ most, relative to their own size.
"""

FOLLOWED = 4.0
"""Times a known change up to which a later reader sees that same change: statistics of one value vary less than this."""
_HANDED = 4.0  # times the change of a trained weight up to which a teacher's differs that follows it
_VIEWED_MOST, _VIEWED_LEAST = 0.02, 4.0
"""Where noise is large, as in bfloat16, the first as a relative change, or the second times the noise, where that is more."""

Right = Callable[[Pair], bool]
"""Returns whether both runs computed an operator rightly, by float64, each from what it was given."""
Changes = dict[tuple[int, int], float]
Exact = Callable[[Changes, bool], Changes]
"""Returns the changes of pairs of rows by the values themselves, where they were kept, given those by statistics, and whether
values count as a whole rather than element by element."""


class Differences:
    """The changes of one step of one rank, and what was found out about each node so far.

    Parameters
    ----------
    a, b
        The two steps.
    alignment
        What matches what.
    earlier
        What is known of this rank's earlier steps; it is carried on.
    exact, right
        Compare the values themselves, and judge what was computed of them, where they were kept.

    Attributes
    ----------
    change_of
        The relative change of each row of A that has a counterpart.
    drifted
        The change up to which values may differ because rounding has moved the weights apart in earlier steps.
    largest
        The largest change among the results of each node of A that was looked at, by its number.
    real
        Numbers of nodes of A whose results differ by more than rounding explains.
    parted_before
        Whether something differed by more than rounding in an earlier step.

    """

    def __init__(
        self,
        a: StepFrame,
        b: StepFrame,
        alignment: Alignment,
        earlier: EarlierSteps,
        exact: Exact | None = None,
        right: Right | None = None,
    ) -> None:
        self.a = a
        self.b = b
        self.alignment = alignment
        self.earlier = earlier
        self.parted_before = earlier.parted
        self.has_values = exact is not None
        self.right = right
        self.drifted = 0.0
        self.change_of = self._measured(exact)
        self.largest: dict[int, float] = {}
        self.real: set[int] = set()
        self.makers = Makers(a, b, alignment)

    def _measured(self, exact: Exact | None) -> dict[int, float]:
        rows = [rows for pair in self.alignment.pairs for rows in (*pair.inputs, *pair.outputs)]
        if not rows:
            return {}
        left, right = (np.array(side, dtype=np.int64) for side in zip(*rows, strict=True))
        of = self.a, self.b, self.alignment.pairs
        faint = np.isin(left, [*faint_rows(*of), *sparse_in_one(*of), *not_set(self.a, self.alignment.pairs)])
        found = np.where(faint, 0.0, changes(self.a, self.b, left, right))
        change_of = dict(zip(left.tolist(), found.tolist(), strict=True))
        self.drifted = drift(self.a, self.alignment.weights, change_of, self.earlier)
        if exact is None:
            return change_of
        # Where much is rounded otherwise, single elements pass a ReLU or take an optimizer's step in one run only.
        whole = (
            self.drifted > COARSE
            or self.rewritten > 0.0
            or (self.precisions is not None and self.roundoff_inside > FINE)
        )
        measured = list(exact(dict(zip(rows, found.tolist(), strict=True)), whole).values())
        return dict(zip(left.tolist(), np.where(faint, 0.0, measured).tolist(), strict=True))

    def returns_another(self, pair: Pair) -> bool:
        """Return whether results are of other sizes, and nobody's fault.

        Of a module, whose user does what the other's does inside, or nothing; of constants; of casts to complex; sparse terms.
        """
        sizes = [self.a.count[i] != self.b.count[j] for i, j in pair.outputs]
        sparse = self.a.is_part and any("sparse" in self.a.text("layout", i) for i, _ in pair.outputs)
        return bool(sizes) and all(sizes) and (sparse or pair.a.kind == "module" or pair.a.op in (*CONSTANT, *CASTS))

    def is_noise(self, pair: Pair, row: int) -> bool:
        """Return whether a row's change is what rounding explains; ask after all nodes were looked at."""
        if row in {out for out, _ in pair.outputs}:
            return pair.a.number in self.largest and pair.a.number not in self.real
        return not self.is_real(pair.a, row)

    def is_real(self, node: Node, row: int) -> bool:
        """Return whether an input of a node differs by more than noise."""
        change = self.change_of[row]
        if change == 0.0:
            return False
        if self.parted_before:
            return True  # statistics tell nothing of how far
        producer = int(self.a.producer[row])
        if producer in self.largest and producer != node.number:
            return producer in self.real
        return change > self.noise_limit()

    def noise_limit(self) -> float:
        """Return the change up to which a value that nobody is known to have made differs by noise."""
        return max(NEGLIGIBLE + self.viewed(self.earlier.noise), self.viewed(self.rewritten), self.drifted)

    def handed_beside(self, name: str) -> float:
        """Return the change up to which a weight may differ that no gradient moves: what its namesake elsewhere hands on."""
        if self.earlier.last is None or not name or name in self.earlier.trained:
            return 0.0
        return _HANDED * self.earlier.beside().get(name, 0.0)

    @staticmethod
    def viewed(noise: float) -> float:
        """Return the change up to which a value may differ that is a part of one within noise."""
        return max(min(VIEWED * noise, _VIEWED_MOST), _VIEWED_LEAST * noise)

    def made_change(self, row_a: int) -> float:
        """Return how far the results of what made a value are apart; 0 if they agree, or nobody is known to have made it.

        Of a cast, also those of what it casts: one that lies otherwise in each run shows less of how far it is apart.
        """
        made = self.largest.get(int(self.a.producer[row_a]), 0.0)
        maker = self.makers.maker(row_a)
        if maker is None or maker.a.op not in CASTS or not maker.inputs:
            return made
        return max(made, self.made_change(maker.inputs[0][0]))

    def is_cancelled(self, pair: Pair) -> bool:
        """Return whether a gradient is so small that it may be rounding errors alone.

        Of two precisions an operator's, too, and an update made of such gradients; nor is a module's looked at there whose
        operators' are: it may be the sum of several backwards'.
        """
        if self.precisions is not None and self.has_operators and (pair.a.kind, pair.a.phase) == ("module", "backward"):
            return True
        if (self.precisions or not self.has_operators) and self.sums.come_to_nothing(pair, self._rounded):
            return True
        rows = [pair.outputs[0]] if pair.a.kind == "gradient" else []
        if self.precisions is not None and pair.a.kind == "optimizer":
            rows = [rows for rows in pair.inputs if self.a.text("slot", rows[0]) == "grad"]
        elif self.precisions is not None and (pair.a.kind, pair.a.phase) == ("op", "backward"):
            rows = [pair.outputs[0]]
        sizes, usual = [(rms(self.a, i), rms(self.b, j)) for i, j in rows], (self.usual_gradient, self._rounded)
        if self.precisions is None:
            return any(size < nothing_of(*usual) for size, _ in sizes)
        return bool(sizes) and all(vanish(size, *usual, self.precisions) for size in sizes)

    @cached_property
    def sums(self) -> GradientSums:
        """Of gradients that are sums."""
        return GradientSums(self.a, self.b, self.alignment.pairs)

    @cached_property
    def _rounded(self) -> float:
        return max(self.coarse, self.roundoff_inside, self.rewritten, roundoff("float32"))

    def differed_before(self, lone: Node, *, first: bool) -> bool:
        """Return whether what only run A (``first``) or only run B computes is made of something that differed already."""
        pairs, names = self.makers.origins(lone, first=first)
        if names & self._moved[0 if first else 1]:
            return True
        if not pairs:  # who made what it read is not known, as in other tools' dumps
            return self.earlier.parted
        return any(pair.a.number in self.real for pair in pairs)

    @cached_property
    def _moved(self) -> tuple[set[str], set[str]]:
        """The names, in A and in B, of the weights that rounding has moved apart in earlier steps by more than noise."""
        if self.earlier.last is None:
            return set(), set()
        moved = [pair for pair in self.alignment.weights if self.change_of[pair.outputs[0][0]] > self.noise_limit()]
        return {pair.a.parameter for pair in moved}, {pair.b.parameter for pair in moved}

    def dtypes(self, row_a: int, row_b: int) -> tuple[str, str]:
        """Return both rows' dtypes."""
        return self.a.text("dtype", row_a), self.b.text("dtype", row_b)

    def roundoff(self, row_a: int, row_b: int) -> float:
        """Return the coarser unit roundoff of two rows."""
        return max(map(roundoff, self.dtypes(row_a, row_b)))

    @cached_property
    def precisions(self) -> tuple[str, str] | None:
        """The dtypes in which the runs compute, A's and B's, where these are not the same; see `which.computed_in`."""
        weights = [pair.outputs[0] for pair in self.alignment.weights]
        return computed_in(*([self.dtypes(*rows) for rows in of] for of in (self._products, weights)))

    @cached_property
    def _products(self) -> list[tuple[int, int]]:
        return [pair.outputs[0] for pair in self.alignment.pairs if pair.outputs and multiplies(self.a, pair)]

    @cached_property
    def copies(self) -> float:
        """The unit roundoff of what weights and inputs may be copies of, where weights are held in other dtypes; else 0."""
        dtypes = (self.dtypes(*pair.outputs[0]) for pair in self.alignment.weights if self.precisions is not None)
        return self.roundoff_inside if any(first != second for first, second in dtypes) else 0.0

    @property
    def slack(self) -> float:
        """Times what rounding explains of operators that is left to them: more than one in later steps of coarse dtypes.

        Of two precisions, or where operators are `rewritten`: by then rounding has moved the weights apart, of which statistics
        show no more than the norms.
        """
        return _LATER if (self.precisions or self.rewritten) and self.earlier.last is not None else 1.0

    @cached_property
    def roundoff_inside(self) -> float:
        """The unit roundoff that values may differ by which are recorded in a finer dtype.

        That of the coarser of the `precisions` or, where ranks or micro-batches with parts of other sizes or another order were
        rounded each, of what the products are computed in (of operators alone, which are not put together, in both runs); 0
        where the runs do the same.
        """
        if self.precisions is not None:
            return max(map(roundoff, self.precisions))
        if not self._products and (self.a.is_part or self.b.is_part):
            return self.coarse
        if (self.a.ranks, self.a.micros) == (self.b.ranks, self.b.micros):
            return 0.0
        return max((self.roundoff(*rows) for rows in self._products), default=0.0)

    @cached_property
    def rewritten(self) -> float:
        """The unit roundoff of the coarse dtype that both runs compute in, where operators are written otherwise; else 0.

        The same mathematics in other operators is rounded at other places then, and so is all that comes of it, in whatever
        dtype that is: gradients in float32, too.
        """
        coarse = self.coarse
        if coarse <= FINE or self.precisions is not None:
            return 0.0
        if self.b.factors is not None:  # another loss scale, which has been taken out
            return coarse
        alone = [any(node.kind == "op" for node in self.alignment.lone(first=first)) for first in (True, False)]
        recast = (pair for pair in self.alignment.pairs if pair.a.kind == "op" and pair.outputs)
        other = all(alone) or any(len(set(self.dtypes(*pair.outputs[0]))) > 1 for pair in recast)
        return coarse if other else 0.0

    @cached_property
    def coarse(self) -> float:
        """The unit roundoff of the dtype that both runs compute their products in; 0 where it is not the same."""
        return roundoff(self.a.computed) if self.a.computed == self.b.computed else 0.0

    @cached_property
    def has_operators(self) -> bool:
        """Whether single operators were recorded."""
        return any(pair.a.kind == "op" for pair in self.alignment.pairs)

    @cached_property
    def usual_gradient(self) -> float:
        """The median root mean square of the step's gradients in A; 0 without any."""
        sizes = [rms(self.a, pair.outputs[0][0]) for pair in self.alignment.pairs if pair.a.kind == "gradient"]
        return float(np.median(sizes)) if sizes else 0.0
