"""The reason of a difference that lies in an operator itself: its dtype, its arguments, what it draws, what it computes."""

from __future__ import annotations

from functools import cached_property

from bitwitness.comparison.differences import FOLLOWED, NEGLIGIBLE, Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.measuring.changes import BITS_DIFFER
from bitwitness.comparison.measuring.describe import argument_differences, is_another_class_alone
from bitwitness.comparison.measuring.relation import not_finite, numbers_of
from bitwitness.comparison.reasons.casts import other_dtype
from bitwitness.comparison.reasons.given import given_alone
from bitwitness.comparison.reasons.readers import Readers
from bitwitness.comparison.reasons.reason import Reason
from bitwitness.oracle.names import is_random
from bitwitness.oracle.recorded import arguments

_SURE = 0.01
"""Share of `NEGLIGIBLE` that a result has to differ by before other arguments are its reason: below, they did not matter."""
_OTHER_CLASS = 4e-6
"""Relative change of a parameter up to which two optimizers' formulas are the same one: some dozen roundings in float32."""
_BEHIND = 10.0
"""Times what is explained, up to which a result behind another suspect is that one's doing: statistics of what was handed on
say little of how far single elements are apart. Seen: healthy products up to 6."""
_LAID = ("batch_first ",)
_RANDOM = "it draws random numbers, and drew others: another seed or another number of draws before"
_ANOTHER_GRADIENT = 1e-3
"""Relative change of what an optimizer reads from which on its update tells nothing of the optimizer."""
_COMPUTED_UPDATE = (
    "parameter, gradient and settings agree and the update does not: the optimizer's state does (moments, step counts), "
    "it computed wrongly, or the weight was written past torch before it (p.data)"
)
_COMPUTED = "its inputs agree and its result does not"


class OwnReasons:
    """Finds the reasons of one step of one rank.

    Parameters
    ----------
    differences
        The step's changes.

    """

    def __init__(self, differences: Differences) -> None:
        self._differences = differences

    def of(self, pair: Pair, worst: float, explained: float) -> Reason | None:
        """Return the reason that lies in a node itself.

        Parameters
        ----------
        worst
            The change of its result that exceeds what is explained by most.
        explained
            What rounding and its inputs' changes explain of it.

        """
        differences, over = self._differences, worst > explained
        if text := other_dtype(differences, pair):
            return Reason("dtype", text)
        carried = max((differences.change_of[row] for row, _ in pair.inputs), default=0.0)
        first, second = (
            self._differences.a.text("args", pair.a.rows[0]),
            self._differences.b.text("args", pair.b.rows[0]),
        )
        if first != second and worst > max(NEGLIGIBLE * _SURE, FOLLOWED * carried * (carried < NEGLIGIBLE)):
            matters = over or carried == 0.0 or worst > differences.roundoff(*pair.outputs[0])
            if differing := self._other_arguments(pair, first, second, worst, over=over) if matters else []:
                return Reason("argument", f"called with other arguments: {'; '.join(differing)}")
        if not over or (not pair.inputs and differences.precisions is not None):
            return None  # the latter: a constant of each run's own dtype
        if not differences.has_values and any(differences.is_real(pair.a, row) for row, _ in pair.inputs):
            return None  # statistics say too little of how far apart differing inputs are
        if is_random(pair.a.op) or (pair.a.kind == "module" and "drop" in pair.a.op.lower()):
            return Reason("random", self._draws_alone(pair) or _RANDOM)
        if not differences.has_values and differences.earlier.parted and worst <= _BEHIND * explained:
            return None
        if worst == BITS_DIFFER:
            return None  # by how much is not known
        if pair.a.kind == "module" and (other := self._other_module(pair)):
            return Reason("argument", other)
        return self._of_update(pair, carried) if pair.a.kind == "optimizer" else self._of_result(pair, explained)

    def _of_result(self, pair: Pair, explained: float) -> Reason | None:
        return None if self._readers.follows(pair, explained) else self._computed_wrongly(pair)

    def _computed_wrongly(self, pair: Pair) -> Reason:
        return Reason("computed", self._computed(pair) + self._overflow(pair) + self._readers.words(pair))

    @cached_property
    def _readers(self) -> Readers:
        return Readers(self._differences)

    def _of_update(self, pair: Pair, carried: float) -> Reason | None:
        """Return that an update differs; of two precisions `precisions.moved` looks at all of them together."""
        other = self._differences.precisions is not None and carried > self._differences.roundoff_inside
        if (other or carried > _ANOTHER_GRADIENT) and not self._overflow(pair):
            return None
        if {self._differences.a.text("slot", row) for row, _ in pair.inputs} <= {"param", "grad"}:
            return Reason("computed", _COMPUTED_UPDATE + self._overflow(pair))
        return self._computed_wrongly(pair)

    def _other_arguments(self, pair: Pair, first: str, second: str, worst: float, *, over: bool) -> list[str]:
        """Return the arguments that differ and matter; of optimizers of other classes none where they have one formula."""
        rank = len(self._differences.a.shapes[pair.inputs[0][0]]) if pair.inputs else 0
        called = arguments(first), arguments(second)
        if is_another_class_alone(*called) and (worst <= _OTHER_CLASS or self._is_one_formula):
            return []
        differing = argument_differences(*called, self._differences.precisions, rank=rank)
        # Some say how what is given lies in memory, which is no matter where what is computed agrees.
        return [one for one in differing if over or not one.startswith(_LAID)]

    def _other_module(self, pair: Pair) -> str:
        """Say that a module is another one, or is given a tensor in one run alone; empty for one that is neither."""
        if pair.a.op != pair.b.op:
            return f"another module: {pair.a.op} in run A, {pair.b.op} in run B"
        given = given_alone(self._differences, pair)
        return f"called with other arguments: {given}" if given else ""

    def _computed(self, pair: Pair) -> str:
        """Say that a result does not agree; statistics of what lies otherwise in memory do not tell the order of its values."""
        a, b = self._differences.a, self._differences.b
        other = [
            i
            for i, j in pair.inputs
            if a.text("layout", i) != b.text("layout", j) and not (a.hashed[i] and b.hashed[j])
        ]
        if self._differences.has_values or not other:
            return _COMPUTED
        name = a.text("name", other[0]) or a.text("slot", other[0])
        return (
            f"its inputs agree in their statistics and its result does not: {name} lies otherwise in memory in each run, and "
            "may hold the same values in another order (--content tensors tells)"
        )

    def _overflow(self, pair: Pair) -> str:
        """Return what is added where a result holds NaN or infinities in one run."""
        told = (not_finite(self._differences.a, self._differences.b, *rows) for rows in pair.outputs)
        return next((f": {text}" for text in told if text), "")

    @cached_property
    def _is_one_formula(self) -> bool:
        """Whether two optimizers' classes move most parameters alike: others have gradients of rounding errors."""
        moved = [pair for pair in self._differences.alignment.pairs if pair.a.kind == "optimizer" and pair.outputs]
        changes = [max(self._differences.change_of[row] for row, _ in pair.outputs) for pair in moved]
        return sum(change <= _OTHER_CLASS for change in changes) > len(changes) / 2

    def _draws_alone(self, pair: Pair) -> str:
        """Say that random numbers are drawn in a module in one run only; empty where both draw, or it is not known."""
        drawn = [
            any(
                node.module == pair.a.module and is_random(node.op)
                for node in self._differences.alignment.lone(first=first)
            )
            for first in (True, False)
        ]
        if drawn[0] == drawn[1]:
            frames = (self._differences.a, pair.a), (self._differences.b, pair.b)
            drawn = [not _is_handed_on(frame, node) for frame, node in frames]
        return f"it draws random numbers in run {'AB'[drawn.index(True)]} alone" if drawn[0] != drawn[1] else ""


def _is_handed_on(frame: StepFrame, node: Node) -> bool:
    """Return whether a node returns the numbers that it reads."""
    return any(numbers_of(frame, i) == numbers_of(frame, j) for i in node.inputs for j in node.outputs)
