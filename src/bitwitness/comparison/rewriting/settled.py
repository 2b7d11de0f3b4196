"""Modules whose results agree although something inside does not: another kernel, or the same mathematics written otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.measuring.relation import is_reordered, lies_otherwise, numbers_of
from bitwitness.comparison.precisions.otherwise import computing
from bitwitness.comparison.rewriting.outcome import leaves_nothing_of, outcome_of
from bitwitness.comparison.suspect import Exceeding

_AGREE = 200.0
"""Unit roundoffs by which a module's results may differ: what some dozen operators' roundings leave."""
_NOISE = 4.0
"""Times the noise that rounding was seen to make, where that is more."""
_LATER = 5.0
"""Times that, where rounding was seen before: an optimizer that looks at signs turns it into steps of its own size."""
_ENOUGH = 16
"""Numbers that a module has to return for their agreement to clear what is inside: a loss may agree by chance."""
_MOST = 0.02
"""The same as a relative change, for dtypes whose unit roundoff is large."""
_SAME_LOSS, _LOSS_BY_CHANCE = 16.0, 1e-5
"""Unit roundoffs up to which a loss is the same one, and the most that may be as a relative change."""
_AS_LARGE = 1e-3
"""By which the norm of a gradient may differ that lies in another order: more says nothing of its values."""
_AS_NOTHING = 1e-6
"""Times the largest gradient, below which one is rounding errors."""
_OF_DRIFTED = 0.75
"""Times what a later step's values may differ by: modules' results were seen to differ by up to 0.7 of that."""
_BY_STATISTICS, _BY_VALUES = 0.25, 0.5
"""The most of that: what a norm makes of anything at all has statistics that differ by little more."""

_OF_MOVED, _MOST_MOVED = 4.0, 0.01
"""Times the change of the weight that differs most, and the most of that: 2.6 was seen in a U-Net in float32 under Adam."""

Call = tuple[str, str, int]
"""A module's path, phase and micro-batch."""


class SettledModules:
    """Knows which modules' results agree within rounding in one step of one rank.

    Parameters
    ----------
    differences
        The step.

    """

    def __init__(self, differences: Differences) -> None:
        self._differences = differences

    def holds(self, pair: Pair) -> bool:
        """Return whether a node is inside a module whose results agree; of a backward, its parameters' gradients, too."""
        return self.clears(pair.a)

    def clears(self, node: Node, names: Mapping[str, str] | None = None) -> bool:
        """Return the same of a node that may have no counterpart; ``names``: A's name of a module of B, by B's."""
        path, phase = (names or {}).get(node.module, node.module), node.phase
        while True:
            agrees = self._results.get((path, phase, node.micro))
            # Nothing but gradients of parameters leaves the root's backward, where its inputs have none; and what the root
            # returns may be one number, a loss, which says little.
            if (agrees or (phase == "backward" and path == "." and agrees is None)) and (
                self._gradients_agree(path) if phase == "backward" or path == "." else self._leads_to_the_same(path)
            ):
                return phase != "forward" or path != "." or self._losses_agree
            if path == ".":
                return False
            path = path.rpartition(".")[0] or "."

    def stored_otherwise(self, pair: Pair) -> bool:
        """Return whether a weight holds the same values in another order, and its module returns the same: it is transposed.

        So are others then, of modules that read something else: one run writes its products otherwise.
        """
        return self._differences.a.text("name", pair.outputs[0][0]) in self._turned and self._some_are_transposed

    def turns(self, gradient: Pair) -> bool:
        """Return whether a gradient holds the same values in another order, and so does its weight, which is transposed."""
        return gradient.a.parameter in self._turned and self._as_large(gradient) and self._some_are_transposed

    @cached_property
    def _some_are_transposed(self) -> bool:
        names = {name.rpartition(".")[0] or "." for name in self._turned}
        micros = range(self._differences.a.micros)
        return any(all(self._results.get((name, "forward", micro)) for micro in micros) for name in names)

    def orders_otherwise(self, pair: Pair) -> bool:
        """Return whether results hold the same values in another order, of which nothing is left: a batch's samples, sorted."""
        a, b = self._differences.a, self._differences.b
        other = [(i, j) for i, j in pair.outputs if self._differences.change_of[i] > 0.0]
        return bool(other) and all(is_reordered(a, i, b, j) for i, j in other) and self._outcome_agrees

    @cached_property
    def _outcome_agrees(self) -> bool:
        """Whether all losses and all gradients of parameters agree, and there are some."""
        return (
            bool(self._gradients)
            and self._gradients_agree(".")
            and bool(self._losses)
            and all(map(self.agrees, self._losses))
        )

    def leave_nothing_of(self, change: float) -> bool:
        """Return whether next to nothing of a relative ``change`` is left in what the step comes to."""
        return leaves_nothing_of(change, self._outcome)

    def left_of(self, exceeding: Sequence[Exceeding]) -> list[Exceeding]:
        """Return those results of which something is left."""
        return [one for one in exceeding if not self.leave_nothing_of(one.change)]

    @cached_property
    def _outcome(self) -> float:
        return outcome_of(self._differences)

    @cached_property
    def _losses_agree(self) -> bool:
        """Whether the losses that both runs go back from agree: a script may compute them behind the model."""
        return self._differences.makers.other_losses or all(map(self.agrees, self._losses))

    @cached_property
    def loss_is_the_same(self) -> bool:
        """Whether all that modules return in the forward agrees, and each loss but for its rounding: by no chance."""
        numbers = [rows for pair in self._losses for rows in pair.outputs]
        limits = [_SAME_LOSS * self._differences.roundoff(*rows) for rows in numbers]
        told = [self._differences.change_of[i] <= limit for (i, _), limit in zip(numbers, limits, strict=True)]
        fine = max(limits, default=1.0) < _LOSS_BY_CHANCE  # one of few bits may be the same by chance
        return bool(told) and fine and all(told) and self.forward_agrees

    @cached_property
    def _losses(self) -> list[Pair]:
        return self._differences.alignment.losses

    def lies_otherwise(self, pair: Pair) -> bool:
        """Return whether a node reads and returns the same values in other shapes: as a product what is a convolution.

        Of operators, those that compute: what moves values on in another shape may be given to what it is not for.
        """
        if pair.a.kind != "module" and not computing([pair.a]):
            return False
        rows = [*pair.inputs, *pair.outputs]
        laid = [lies_otherwise(self._differences.a, i, self._differences.b, j) for i, j in rows]
        same = [self._differences.change_of[i] == 0.0 for i, _ in rows]
        return any(laid) and all(x or y for x, y in zip(laid, same, strict=True))

    @cached_property
    def _results(self) -> dict[Call, bool]:
        found: dict[Call, bool] = {}
        for pair in self._differences.alignment.pairs:
            if pair.a.kind != "module" or not pair.outputs or self._differences.returns_another(pair):
                continue
            if pair.a.module == "." or self._says_enough(pair):
                call = pair.a.module, pair.a.phase, pair.a.micro
                found[call] = found.get(call, True) and self.agrees(pair)
        # A script may call the parts of a model one by one: what it does between them is in no module that returns it.
        return found if any(path == "." and phase == "forward" for path, phase, _ in found) else found | self._by_losses

    def _says_enough(self, pair: Pair) -> bool:
        return sum(int(self._differences.a.count[row]) for row, _ in pair.outputs) >= _ENOUGH

    @property
    def forward_agrees(self) -> bool:
        """Whether all that modules returned in the forward agrees, and there was something."""
        pairs = [p for p in self._differences.alignment.pairs if p.a.kind == "module" and p.a.phase == "forward"]
        return any(map(self._says_enough, pairs)) and all(map(self.agrees, pairs))

    @cached_property
    def returned_agrees(self) -> bool:
        """Whether all that the model returned agrees, whatever becomes of it inside; where nobody saw it, all modules'."""
        pairs = [pair for pair in self._differences.alignment.pairs if pair.is_root("forward")]
        return self.forward_agrees or (any(map(self._says_enough, pairs)) and all(map(self.agrees, pairs)))

    @property
    def _by_losses(self) -> dict[Call, bool]:
        """Where the root's forward was not recorded, its results are its losses, and what they lead to."""
        agree = self._gradients_agree(".") and all(map(self.agrees, self._losses))
        return {(".", "forward", micro): agree for micro in range(self._differences.a.micros)}

    def agrees(self, pair: Pair) -> bool:
        """Return whether all results of a node agree within rounding."""
        return all(self.agree(*rows) for rows in pair.outputs)

    def agree(self, row_a: int, row_b: int) -> bool:
        """Return whether two rows, of A and B, agree within rounding."""
        differences = self._differences
        own = max(differences.roundoff(row_a, row_b), differences.rewritten)
        limit = max(_AGREE * own, _NOISE * differences.earlier.noise)
        limit = min(limit * (_LATER if differences.earlier.noise else 1.0), _MOST)
        if differences.rewritten and differences.earlier.last is not None:
            limit = max(limit, _MOST * differences.slack)
        limit = max(
            limit, min(_OF_DRIFTED * differences.drifted, _BY_VALUES if differences.has_values else _BY_STATISTICS)
        )
        return self._differences.change_of[row_a] <= max(limit, self._moved)

    @cached_property
    def _moved(self) -> float:
        """What a later step's results may differ by because of the one weight that rounding has moved furthest apart."""
        differences = self._differences
        if differences.earlier.last is None or differences.parted_before:
            return 0.0
        weights = differences.alignment.weights
        rows = [pair.outputs[0][0] for pair in weights if pair.a.parameter in differences.earlier.trained]
        moved = [differences.change_of[row] for row in rows if len(differences.a.shapes[row]) > 1]
        return min(_OF_MOVED * max(moved, default=0.0), _MOST_MOVED)

    def _leads_to_the_same(self, path: str) -> bool:
        """Return whether no parameter in a module has another gradient: what is small in its results may not be so in these."""
        return all(self._gradients_inside(path))

    def _gradients_inside(self, path: str) -> list[bool]:
        inside = "" if path == "." else f"{path}."
        return [ok for name, ok in self._gradients.items() if name.startswith(inside)]

    def _gradients_agree(self, path: str) -> bool:
        found = self._gradients_inside(path)
        return all(found) if found else path == "." and self._renamed_gradients_agree

    @cached_property
    def _renamed_gradients_agree(self) -> bool:
        """Whether gradients of parameters that all have other names in each run are as large, in the order of size."""
        first, second = (
            sorted(float(frame.numbers["l2"][row]) for row in np.flatnonzero(_complete(frame)).tolist())
            for frame in (self._differences.a, self._differences.b)
        )
        if not first or len(first) != len(second) or not all(map(math.isfinite, (*first, *second))):
            return False
        return all(
            abs(x - y) <= _AS_LARGE * max(x, y) or max(x, y) <= _AS_NOTHING * first[-1]
            for x, y in zip(first, second, strict=True)
        )

    @cached_property
    def _gradients(self) -> dict[str, bool]:
        pairs = [pair for pair in self._differences.alignment.pairs if pair.a.kind == "gradient"]
        return {pair.a.parameter: self._gradient_agrees(pair) for pair in pairs}

    def _gradient_agrees(self, pair: Pair) -> bool:
        turned = pair.a.parameter in self._turned and self._as_large(pair)
        return turned or self.agrees(pair) or self._differences.is_cancelled(pair)

    @cached_property
    def _turned(self) -> set[str]:
        """The weights that hold the same values in another order, transposed: so do their gradients, but for rounding."""
        a, b = self._differences.a, self._differences.b
        state = [
            pair
            for pair in self._differences.alignment.pairs
            if pair.a.kind in ("parameter", "buffer") and pair.outputs
        ]
        return {a.text("name", p.outputs[0][0]) for p in state if all(is_reordered(a, i, b, j) for i, j in p.outputs)}

    def _as_large(self, pair: Pair) -> bool:
        sizes = [
            (numbers_of(self._differences.a, i).l2, numbers_of(self._differences.b, j).l2) for i, j in pair.outputs
        ]
        return all(abs(x - y) <= _AS_LARGE * max(x, y) for x, y in sizes)


def _complete(frame: StepFrame) -> npt.NDArray[np.bool_]:
    """Return which rows are complete gradients."""
    found: npt.NDArray[np.bool_] = frame.texts["kind"].equals("gradient") & frame.texts["slot"].equals("reduced")
    return found
