"""Why a node's results differ: a reason of its own, or an input that differs and that no matched operator made so."""

from __future__ import annotations

import math
from collections.abc import Iterable

from bitwitness.comparison.differences import FOLLOWED, NEGLIGIBLE, Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.batches import counts_in_parts
from bitwitness.comparison.matching.operands import Operands
from bitwitness.comparison.matching.tokens import CASTS
from bitwitness.comparison.measuring.allowance import roundoff
from bitwitness.comparison.measuring.changes import moved
from bitwitness.comparison.measuring.describe import by_each, in_chain, made_by_nothing, of_one_run
from bitwitness.comparison.measuring.relation import and_so, in_words
from bitwitness.comparison.reasons.before import computed_before
from bitwitness.comparison.reasons.casts import given_behind_casts
from bitwitness.comparison.reasons.choices import chooses_otherwise
from bitwitness.comparison.reasons.handed import noise_read_by
from bitwitness.comparison.reasons.inplace import changed_since, is_into_bucket, is_written, is_written_over
from bitwitness.comparison.reasons.reason import OUTSIDE, SINCE, Reason

_ROUNDED = 4.0
"""Unit roundoffs by which what the runs begin with may differ, kept in another dtype."""
_IN_BACKWARD = 64.0
"""Unit roundoffs of the coarser precision by which sketches of a deep backward were seen apart: 38 in a CLIP of two layers."""


class Reasons:
    """Finds the reasons in one step of one rank; knows how far apart parameters and buffers are.

    Parameters
    ----------
    differences
        The step's changes.

    """

    def __init__(self, differences: Differences) -> None:
        self._differences = differences
        self._earlier = differences.earlier
        self._operands = Operands(differences.a, differences.b, differences.alignment, differences.makers)
        self.a, self.b = differences.a, differences.b
        pairs = differences.alignment.pairs
        state = [pair for pair in pairs if pair.a.kind in ("parameter", "buffer")]
        given = [pair for pair in pairs if pair.is_root("forward")]
        self._begun_rows = self._by_name(rows for pair in state for rows in pair.outputs)
        self._begun = {name: differences.change_of[row] for name, (row, _) in self._begun_rows.items()}
        self._begun_weights = {pair.a.parameter for pair in state if pair.a.kind == "parameter"}
        self._given: dict[str, float] = {}  # by most, of several calls
        for row, _ in (rows for pair in given for rows in pair.inputs):
            name = self.a.text("name", row)
            self._given[name] = max(self._given.get(name, 0.0), differences.change_of[row])
        self._computed_before = computed_before(differences)
        self._written: dict[str, float] = {}
        self._told: set[str] = set()
        self.moved = False
        """Whether the optimizer moved a weight within the step, between two evaluations, otherwise in each run."""

    def _by_name(self, found: Iterable[tuple[int, int]]) -> dict[str, tuple[int, int]]:
        return {name: rows for rows in found if (name := self.a.text("name", rows[0]))}

    @property
    def named(self) -> dict[str, float]:
        """The latest change of each parameter and buffer of this step, by name; infinite where one run alone updated it."""
        lone = (n for first in (True, False) if all(self._step) for n in self._differences.alignment.lone(first=first))
        alone = {node.module: math.inf for node in lone if node.kind == "optimizer"}
        if self._differences.precisions and len(set(self._step)) > 1:  # of copies in another dtype, say
            alone |= dict.fromkeys(self._begun_weights, math.inf)
        return self._begun | self._written | alone

    @property
    def _step(self) -> list[bool]:
        """Whether the optimizers of A and of B were seen to step by now: a script may update its weights itself."""
        frames = zip((self.a, self.b), self._earlier.last or (self.a, self.b), strict=True)
        return [any(frame.texts["kind"].equals("optimizer").any() for frame in both) for both in frames]

    def remember(self, pair: Pair) -> None:
        """Keep how far apart a parameter or buffer is that was just written: the next step reads it."""
        for row, _ in pair.outputs:
            name = self.a.text("name", row)
            if name:
                self._written[name] = self._differences.change_of[row]

    def of_state(self, pair: Pair) -> Reason | None:
        """Return that a parameter or buffer differs from the beginning, where no reader of it was told of.

        What no gradient moves is looked at in each step: who made it of other weights may do so at any.
        """
        row_a, row_b = pair.outputs[0]
        name, change = self.a.text("name", row_a), self._differences.change_of[row_a]
        known = self._earlier.named.get(name)
        if not name or name in self._told or self._differences.parted_before:
            return None
        limit = max(self._of_dtype(row_a, row_b), self._differences.handed_beside(name))
        if known is not None:
            limit = max(limit, self._differences.noise_limit())
            if pair.a.kind == "buffer" or name in self._earlier.trained or known > limit:
                return None
        if change <= limit:
            return None
        if pair.a.kind == "buffer" and is_written(self.a, row_a) != is_written(self.b, row_b):
            return None  # in one run it was noted late
        words = in_words(self.a, self.b, row_a, row_b) + (SINCE if self._earlier.last is not None else "")
        return Reason("source", f"{name} differs: {words}", rows=(row_a, row_b))

    def _of_dtype(self, *rows: int) -> float:
        return NEGLIGIBLE + _ROUNDED * max(self._differences.roundoff(*rows), self._differences.copies)

    def of_inputs(self, pair: Pair) -> Reason | None:
        """Return why an input differs, if no matched operator made the difference."""
        if pair.a.kind == "module" and "BatchNorm" in pair.a.op and self.a.micros != self.b.micros:
            counts = f"{self.a.micros} against {self.b.micros} micro-batches"
            return Reason(
                "argument", f"it normalises each micro-batch by its own statistics: {counts} are not the same to it"
            )
        differences, makers = self._differences, self._differences.makers
        changed = [rows for rows in pair.inputs if differences.change_of[rows[0]] > 0.0]
        differing = [rows for rows in changed if not counts_in_parts(differences, pair, rows[0])]
        for row_a, row_b in differing:
            if (other := self._of_other(pair, row_a, row_b)) is not None:
                return other
        for row_a, row_b in differing:
            made = int(self.a.producer[row_a])  # a matched node, one that only one run has, or nobody who is recorded
            if self._operands.other(row_a, row_b) is not None:
                continue
            if differences.precisions and (behind := makers.behind_casts(row_a, row_b)) in differences.largest:
                found = self._from_view(pair, row_a, row_b, differences.largest[behind])
            elif any(makers.lone(row_a, row_b)):
                found = self.of_lone(pair, row_a, row_b)
            elif made in differences.largest:
                found = self._from_view(pair, row_a, row_b, differences.largest[made])
            else:
                found = self._from_outside(pair, row_a, row_b, differences.change_of[row_a])
            if found is not None:
                return found
        return None

    def _of_other(self, pair: Pair, row_a: int, row_b: int) -> Reason | None:
        """Return that the runs read two different things there, of which neither differs itself."""
        differences, others = self._differences, self._operands.other(row_a, row_b)
        if others is None or is_into_bucket(self.a, pair):
            return None
        if any(one.node in differences.real for one in others):
            return None  # an addition whose operands stand in another order hands on what one of them is
        if pair.a.kind == "module" and not all(one.name for one in others):
            return None  # what it is given has the place of whoever made it last
        if differences.change_of[row_a] <= differences.noise_limit():
            return None
        slot = self.a.text("slot", row_a)
        first, second = (other.text for other in others)
        if first == second:
            second = f"another call's {second}"
        return Reason("view", f"{slot} is {first} in run A, and {second} in run B")

    def of_value(self, row_a: int, row_b: int) -> Reason:
        """Return the reason of a gradient that no recorded operator made."""
        words = in_words(self.a, self.b, row_a, row_b)
        why = made_by_nothing(self.a, self.b, operators=self._differences.has_operators)
        return Reason("unknown", f"it differs ({words}), and {why}")

    def of_lone(self, pair: Pair, row_a: int, row_b: int) -> Reason | None:
        """Return that a node which only one run has made a value, if that is why the value differs."""
        differences, change = self._differences, self._differences.change_of[row_a]
        lone_a, lone_b = differences.makers.lone_near(pair, row_a, row_b)
        lone = lone_a or lone_b
        assert lone is not None  # noqa: S101 - the caller asked
        first, second = differences.dtypes(row_a, row_b)
        own = max(differences.roundoff(row_a, row_b), differences.roundoff_inside)
        deep = _IN_BACKWARD * own if differences.precisions is not None and pair.a.phase == "backward" else 0.0
        read = noise_read_by(differences, lone, first=lone_a is not None)
        limit = max(differences.viewed(self._earlier.noise + own), differences.noise_limit(), deep, read)
        if lone.op in CASTS and (behind := differences.makers.behind_cast(lone, first=lone_a is not None)) is not None:
            lone = behind
        elif lone.op in CASTS and (first != second or differences.precisions is not None):
            given = given_behind_casts(differences, row_a, row_b) if differences.precisions is not None else None
            # Else it is told as the dtype of what reads it, or of the run.
            return self._from_outside(pair, *given) if given is not None else None
        if change <= limit:
            return None
        if differences.differed_before(lone, first=lone_a is not None):
            return None
        side = "a" if lone_a is not None else "b"
        reader = f"{pair.a.site}.{self.a.text('slot', row_a)}"
        words = in_words(self.a, self.b, row_a, row_b)
        group = differences.makers.common_group(row_a, row_b)
        if group is not None:
            ways = by_each(in_chain(group.a), in_chain(group.b))
            return Reason(
                "missing", f"what {reader} reads is computed {ways}, with other results ({words})", lone, side
            )
        lone, count = differences.makers.beginning(lone, first=lone_a is not None)
        adds = lone.op == "add_" and pair.a.kind == "gradient"
        return Reason("missing", of_one_run(side.upper(), f"{reader} ({words})", count, adds=adds), lone, side)

    def _from_view(self, pair: Pair, row_a: int, row_b: int, made: float) -> Reason | None:
        """Return the reason of an input whose maker's results differ by ``made``: less than it explains."""
        differences = self._differences
        own = max(roundoff(self.a.text("dtype", row_a)), differences.roundoff_inside, differences.rewritten)
        coarse = differences.precisions is not None and pair.a.phase == "backward"
        if pair.a.kind == "module" or self._differences.parted_before or coarse:
            return None  # of values that differ already, a part may differ more than the whole
        limit = differences.slack * differences.viewed(max(made, self._earlier.noise) + own)
        if differences.change_of[row_a] <= max(limit, differences.drifted):
            return None
        if (edited := changed_since(self.a, self.b, pair, row_a, row_b)) is not None:
            return Reason("edited", edited) if edited else None
        if self._earlier.parted or chooses_otherwise(differences, pair.a.module):
            return None  # what is behind a difference already shows more of it in a part than in the whole
        slot = self.a.text("slot", row_a)
        said = f"{slot} differs although what it is taken from agrees: another view (a transpose, a slice)"
        return Reason("view", said)

    def _from_outside(self, pair: Pair, row_a: int, row_b: int, change: float) -> Reason | None:
        """Return the reason of an input that no recorded operator made."""
        name = self.a.text("name", row_a) or self.b.text("name", row_b)
        slot = self.a.text("slot", row_a)
        late = self._differences.parted_before
        known = self._written.get(name, self._earlier.named.get(name))
        change = min(change, self._as_shards(known, row_a, row_b))
        read_before = name in self._told and pair.a.phase == "backward"  # by the forward
        if read_before or (known is None and late):
            return None  # the latter: the runs parted before, and nobody recorded what became of this
        if known is not None and (change <= FOLLOWED * known + NEGLIGIBLE or (late and self._is_gathered(name, row_a))):
            return None
        if not name and (self._earlier.parted or pair.a.kind == "module" or pair.a.phase == "backward"):
            return None  # it may be what a function that was not recorded made of differing values
        inside = self._differences.roundoff_inside if self._differences.precisions else 0.0  # by unseen code, too
        if not name and (is_written_over(self.a, pair, row_a) or change <= _ROUNDED * inside):
            return None
        if self._moved_since(name, row_a, row_b):
            self.moved = True
            return None  # the optimizer did, which comes last in the step
        # What the runs begin with has no noise yet, but that of its own dtype.
        begun = name and known is None and not late
        copied = _ROUNDED * self._differences.copies if name else 0.0
        limit = self._of_dtype(row_a, row_b) if begun else max(self._differences.noise_limit(), copied)
        limit = max(limit, self._differences.handed_beside(name), self._computed_before.get(name, 0.0))
        if change <= limit:
            return None
        if not name:
            words = in_words(self.a, self.b, row_a, row_b)
            text = f"{slot} differs ({words}), and no recorded operator made it"
            return Reason("unknown", text, rows=(row_a, row_b))
        first, second = self._differences.dtypes(row_a, row_b)
        if first != second and self._differences.precisions is None:
            return Reason("dtype", f"{name} is {first} against {second}")
        if self._begun.get(name, self._given.get(name)) == 0.0 and not self._is_gathered(name, row_a):
            text = f"{slot} differs although {name} agrees, of which it is a view: another one (a transpose, a slice)"
            return Reason("view", text, rows=(row_a, row_b))
        return self._named_source(name, (row_a, row_b), known, limit)

    def _named_source(self, name: str, rows: tuple[int, int], known: float | None, limit: float) -> Reason:
        """Return that a weight, a buffer or an input differs; ``known``: by how much it did when it was last written."""
        self._told.add(name)
        called = name if name.startswith("input ") else f"its {name}"
        words = in_words(self.a, self.b, *rows)
        # A step before in which nothing differed leaves no names.
        before = 0.0 if known is None and self._earlier.last is not None else known
        agreed = before is not None and before <= limit and not self._written.get(name)
        if agreed and self._begun.get(name, 0.0) > limit:
            words += SINCE  # by which suspects are put together
        elif name in self._begun_weights:
            others = self._begun_weights & self._begun.keys() - {name}
            words += and_so(sum(self._begun[other] > limit for other in others))
        return Reason("source", f"{called} differs: {words}{OUTSIDE * name.startswith('input ')}", rows=rows)

    def _as_shards(self, known: float | None, row_a: int, row_b: int) -> float:
        """Return by how much a weight differs as its update tells it where ranks are put together: of shards by the norm."""
        if known is None or self.a.ranks == self.b.ranks:
            return math.inf
        first, second = float(self.a.numbers["l2"][row_a]), float(self.b.numbers["l2"][row_b])
        return abs(first - second) / max(abs(first), abs(second)) if first != second else 0.0

    def _moved_since(self, name: str, row_a: int, row_b: int) -> bool:
        """Return whether a parameter is not what it was when the step began: an optimizer evaluates the model several times."""
        begun = self._begun_rows.get(name)
        if begun is None or self._is_gathered(name, row_a):
            return False
        return moved(self.a, begun[0], row_a) or moved(self.b, begun[1], row_b)

    def of_moved(self, pair: Pair) -> Reason | None:
        """Return that an update begins with another weight than its step did, in one run alone: it was not put back."""
        for row_a, row_b in pair.inputs:
            begun = self._begun_rows.get(self.a.text("name", row_a) or pair.a.module)
            if self.a.text("slot", row_a) != "param" or begun is None:
                continue
            away = [moved(self.a, begun[0], row_a), moved(self.b, begun[1], row_b)]
            if away in ([True, False], [False, True]) and self._differences.change_of[row_a] > NEGLIGIBLE:
                run, other = ("A", "B") if away[0] else ("B", "A")
                when = f"when run {run}'s optimizer updates it, and is in run {other}"
                text = f"{pair.a.module} is not what the step began with {when}: it was written in between, and not put back"
                return Reason("source", text, rows=(row_a, row_b))
        return None

    def _is_gathered(self, name: str, row: int) -> bool:
        """Return whether a row shows the whole of a parameter of which this rank holds a part: it differs where others' do."""
        begun = self._begun_rows.get(name)
        return begun is not None and self.a.count[begun[0]] < self.a.count[row]
