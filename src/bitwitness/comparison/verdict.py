"""Which operators made the difference: error that was made here told from error that was handed on.

Nodes are looked at in the order of execution. A node is a *suspect* if one of these holds, and its results differ by more
than rounding explains:

``computed``   inputs agree as far as their changes matter, and the result does not
``argument``   it was called with other arguments (an epsilon, a scale, a learning rate)
``dtype``      it computed in another precision
``source``     it read something that differs and that no recorded operator made: a weight, a buffer, the batch, a view
``unknown``    the same, and it has no name
``missing``    only one of the runs has it, and what follows differs
``random``     it draws random numbers, and drew others
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bitwitness.comparison.align import Alignment, Pair
from bitwitness.comparison.allowance import allowed, arguments, rms, roundoff
from bitwitness.comparison.changes import BITS_DIFFER, changes
from bitwitness.comparison.describe import argument_differences, norms
from bitwitness.comparison.frame import Frame, Node
from bitwitness.comparison.names import is_random
from bitwitness.comparison.suspect import History, Suspect

_STILL = 1e-6  # by which statistics of equal numbers may differ, taken by another number of threads
_GRADIENT = 1e-3  # by which a gradient of which nothing else is known may differ
_CANCELLED = 1e-3  # of the usual gradient: one as small may be rounding errors alone, as a key's bias has none
_VIEWED = 100.0
_FOLLOWED = 4.0
_CASTS = ("_to_copy", "to", "type_as")
_ILL_CONDITIONED = 1000.0  # unit roundoffs: a result for which so much is explained says nothing about the others


Exact = Callable[[dict[tuple[int, int], float]], dict[tuple[int, int], float]]
"""Returns the changes of pairs of rows by the values themselves, where they were kept, given those by statistics."""


class Cause(NamedTuple):
    """Why a node's results differ: one of the reasons above, and words; ``lone``: the operator that only run ``side`` has."""

    reason: str
    text: str
    lone: Node | None = None
    side: str = ""


class Judge:
    """Goes through one step of one rank; `suspects` yields what it finds, in order.

    Parameters
    ----------
    a, b
        The two steps.
    alignment
        What matches what.
    rank, step
        Where they are from.
    history
        Of this rank; it is carried on.
    exact
        Compares the values themselves, where they were kept.

    """

    def __init__(
        self,
        a: Frame,
        b: Frame,
        alignment: Alignment,
        rank: int,
        step: int,
        history: History,
        exact: Exact | None = None,
    ) -> None:
        self.a = a
        self.b = b
        self._alignment = alignment
        self._rank = rank
        self._step = step
        self._history = history
        self._made_a = {pair.a.number: pair for pair in alignment.pairs if pair.a.outputs}
        self._made_b = {pair.b.number: pair for pair in alignment.pairs if pair.b.outputs}
        self._lone_a = {node.number: node for node in alignment.lone(first=True)}
        self._lone_b = {node.number: node for node in alignment.lone(first=False)}
        self._out: dict[int, float] = {}
        self._real: set[int] = set()
        self._told: set[str] = set()
        self._real_modules: set[str] = set()
        self._begun: dict[str, float] = {}
        self._written: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._late = history.parted
        self.change_of: dict[int, float] = {}
        """The change of each row of A that has a counterpart."""
        self._exact = exact is not None
        self._measure(exact)

    def _measure(self, exact: Exact | None) -> None:
        rows = [rows for pair in self._alignment.pairs for rows in (*pair.inputs, *pair.outputs)]
        if not rows:
            return
        left, right = (np.array(side, dtype=np.int64) for side in zip(*rows, strict=True))
        found = changes(self.a, self.b, left, right).tolist()
        if exact is not None:
            found = list(exact(dict(zip(rows, found, strict=True))).values())
        self.change_of = dict(zip(left.tolist(), found, strict=True))

    def suspects(self) -> Iterator[Suspect]:
        """Yield the suspects in the order of execution."""
        state = [pair for pair in self._alignment.pairs if pair.a.kind in ("parameter", "buffer")]
        self._begun = {self.a.text("name", row): self.change_of[row] for pair in state for row, _ in pair.outputs}
        self._sizes = {self.a.text("name", row): int(self.a.count[row]) for pair in state for row, _ in pair.outputs}
        for pair in self._alignment.pairs:
            if pair.a.kind in ("parameter", "buffer"):
                continue  # what reads them is looked at
            suspect = self._look(pair)
            self._remember(pair)
            if suspect is not None and not (pair.a.kind == "module" and self._told_inside(pair.a.module)):
                self._history.parted = True
                self._told.add(suspect.site.partition("/")[0])
                yield suspect
        self._history.named = self._begun | self._written

    def _seen_inside(self, pair: Pair) -> bool:
        """Tell whether a module's result was made by an operator that is recorded itself."""
        inside = f"{pair.a.module}." if pair.a.module != "." else ""
        if self._late and any(path.startswith(inside) and path != pair.a.module for path in self._real_modules):
            return True
        return pair.a.module in self._with_operators

    @cached_property
    def _with_operators(self) -> set[str]:
        """The modules of which operators are recorded, and all modules around them."""
        found: set[str] = set()
        for path in {pair.a.module for pair in self._alignment.pairs if pair.a.kind == "op"}:
            parts = path.split(".")
            found |= {".".join(parts[:i]) for i in range(1, len(parts) + 1)} | {"."}
        return found

    def _told_inside(self, path: str) -> bool:
        """Tell whether something inside a module was named already: the module's own difference is that."""
        return (path == "." and bool(self._told)) or any(
            told == path or told.startswith(path + ".") for told in self._told
        )

    def is_noise(self, pair: Pair, row: int) -> bool:
        """Tell whether a row's change is what rounding explains; ask after `suspects` ran through."""
        if row in {out for out, _ in pair.outputs}:
            return pair.a.number in self._out and pair.a.number not in self._real
        return not self._is_real(pair.a, row)

    # -- one node ------------------------------------------------------------------------------------------------

    def _look(self, pair: Pair) -> Suspect | None:
        carried = [self.change_of[row] for row, _ in pair.inputs]
        results = [self.change_of[row] for row, _ in pair.outputs]
        largest = max(results, default=0.0)
        self._out[pair.a.number] = largest
        if largest == 0.0:
            return None
        explained, worst = self._worst(pair, carried, results)
        over = worst > explained
        if not pair.inputs:
            return self._without_inputs(pair, worst)
        differing = any(self._is_real(pair.a, row) for row, _ in pair.inputs)
        if over or (differing and worst > 0):
            self._real.add(pair.a.number)
            self._real_modules.add(pair.a.module)
        elif explained <= min(0.05, _ILL_CONDITIONED * self._roundoff(pair)):
            self._history.noise = max(self._history.noise, worst)
        if pair.a.kind == "collective" or (pair.a.kind == "module" and self._seen_inside(pair)):
            return None  # the one computes nothing, the other's operators are looked at themselves
        source = self._source(pair, carried) if worst > 0 else None
        if source is not None:
            self._real.add(pair.a.number)
            return self._suspect(pair, source, worst, self._rounding(pair), clean=False)
        cause = self._own_cause(pair, worst, over=over)
        if cause is None:
            return None
        explained = explained if cause.reason == "computed" else min(explained, self._rounding(pair))
        return self._suspect(pair, cause, worst, explained, clean=not differing)

    def _rounding(self, pair: Pair) -> float:
        """Return what a node's own rounding explains, with equal inputs."""
        return allowed(self.a, self.b, pair, 0, [0.0] * len(pair.inputs))

    def _worst(self, pair: Pair, carried: list[float], results: list[float]) -> tuple[float, float]:
        """Return what is explained and what is seen, of the result that exceeds it most."""
        background = self._history.noise
        noisy = [c if c == 0.0 else max(c, background) for c in carried]
        best = (math.inf, 0.0)
        for i, change in enumerate(results):
            explained = allowed(self.a, self.b, pair, i, noisy)
            ratio = change / explained if explained else math.inf
            if i == 0 or ratio > best[1] / best[0]:
                best = (explained, change)
        return best

    def _own_cause(self, pair: Pair, worst: float, *, over: bool) -> Cause | None:
        if text := self._dtypes(pair):
            return Cause("dtype", text)
        carried = max((self.change_of[row] for row, _ in pair.inputs), default=0.0)
        own = self._roundoff(pair)
        first, second = self.a.text("args", pair.a.rows[0]), self.b.text("args", pair.b.rows[0])
        if first != second and worst > max(_STILL * 0.01, _FOLLOWED * carried * (carried < _STILL)):
            differing = argument_differences(arguments(first), arguments(second))
            if differing and (over or worst > own):
                return Cause("argument", f"called with other arguments: {'; '.join(differing)}")
        if not over or (not self._exact and any(self._is_real(pair.a, row) for row, _ in pair.inputs)):
            return None  # statistics say too little of how far apart differing inputs are
        if is_random(pair.a.op):
            return Cause(
                "random", "it draws random numbers, and drew others: another seed or another number of draws before"
            )
        if worst == BITS_DIFFER:
            return None
        return Cause("computed", "its inputs agree and its result does not")

    def _roundoff(self, pair: Pair) -> float:
        row_a, row_b = pair.outputs[0]
        return max(roundoff(self.a.text("dtype", row_a)), roundoff(self.b.text("dtype", row_b)))

    def _dtypes(self, pair: Pair) -> str:
        """Tell of another dtype of the result or of an input that was cast for it."""
        for row_a, row_b in (*pair.outputs[:1], *pair.inputs):
            first, second = self.a.text("dtype", row_a), self.b.text("dtype", row_b)
            if first != second and self._cast_here(pair, row_a, row_b):
                return f"computed in {first} against {second}"
        return ""

    def _cast_here(self, pair: Pair, row_a: int, row_b: int) -> bool:
        """Tell whether another dtype begins here: it was not handed on by a matched operator."""
        if (row_a, row_b) in pair.outputs:
            return all(
                self.a.text("dtype", i) == self.b.text("dtype", j) or self._cast_here(pair, i, j)
                for i, j in pair.inputs
            )
        makers = self._lone_a.get(int(self.a.producer[row_a])), self._lone_b.get(int(self.b.producer[row_b]))
        return any(maker is not None and maker.op in _CASTS for maker in makers)

    def _without_inputs(self, pair: Pair, worst: float) -> Suspect | None:
        """Judge a value that stands alone: a gradient, a saved point."""
        row = pair.outputs[0][0]
        if pair.a.kind == "op":
            self._real.add(pair.a.number)
            cause = self._own_cause(pair, worst, over=worst > _STILL)
            return None if cause is None else self._suspect(pair, cause, worst, _STILL, clean=True)
        if pair.a.kind == "collective":
            self._real.add(pair.a.number)
            return None  # it delivers what another rank differs in
        if (
            self._handed_on(row, pair.outputs[0][1])
            or self._history.parted
            or worst <= _STILL + _VIEWED * self._history.noise
        ):
            return None
        if pair.a.kind != "gradient" or worst <= _GRADIENT or rms(self.a, row) < _CANCELLED * self._usual:
            return None
        self._real.add(pair.a.number)
        cause = Cause("unknown", "it differs, and no recorded operator made it")
        return self._suspect(pair, cause, worst, _STILL, clean=True)

    @cached_property
    def _usual(self) -> float:
        sizes = [rms(self.a, pair.outputs[0][0]) for pair in self._alignment.pairs if pair.a.kind == "gradient"]
        return float(np.median(sizes)) if sizes else 0.0

    # -- where an input's difference comes from --------------------------------------------------------------------

    def _is_real(self, node: Node, row: int) -> bool:
        """Tell whether an input differs by more than noise."""
        change = self.change_of[row]
        if change == 0.0:
            return False
        if self._late:
            return True  # the runs parted in an earlier step: statistics tell nothing of how far
        producer = int(self.a.producer[row])
        if producer in self._out and producer != node.number:
            return producer in self._real
        return change > _STILL + _VIEWED * self._history.noise

    def _handed_on(self, row_a: int, row_b: int) -> bool:
        producer = int(self.a.producer[row_a])
        return (
            self._out.get(producer, 0.0) > 0 or producer in self._lone_a or int(self.b.producer[row_b]) in self._lone_b
        )

    def _source(self, pair: Pair, carried: list[float]) -> Cause | None:
        """Return why an input differs, if no matched operator made the difference."""
        if pair.a.kind == "optimizer":
            return None
        for (row_a, row_b), change in zip(pair.inputs, carried, strict=True):
            if change == 0.0:
                continue
            made_a, made_b = int(self.a.producer[row_a]), int(self.b.producer[row_b])
            lone = self._lone_a.get(made_a) or self._lone_b.get(made_b)
            if lone is not None:
                found = self._from_lone(pair, row_a, row_b, change, lone, made_a)
            elif made_a in self._out:
                found = self._from_view(pair, row_a, change, self._out[made_a])
            else:
                found = self._from_outside(pair, row_a, row_b, change)
            if found is not None:
                return found
        return None

    def _from_lone(self, pair: Pair, row_a: int, row_b: int, change: float, lone: Node, made_a: int) -> Cause | None:
        if lone.op in _CASTS and self.a.text("dtype", row_a) != self.b.text("dtype", row_b):
            return None  # told as the dtype of what reads it
        own = max(roundoff(self.a.text("dtype", row_a)), roundoff(self.b.text("dtype", row_b)))
        if change <= _VIEWED * (self._history.noise + own) or self._real_before(lone, first=made_a in self._lone_a):
            return None
        side = "a" if made_a in self._lone_a else "b"
        reader = f"{pair.a.site}.{self.a.text('slot', row_a)}"
        text = f"only run {side.upper()} has it, and its result matters to {reader}"
        return Cause("missing", text, lone, side)

    def _real_before(self, lone: Node, *, first: bool) -> bool:
        """Tell whether what a lone operator read differed already."""
        frame, made = (self.a, self._made_a) if first else (self.b, self._made_b)
        pairs = [pair for row in lone.inputs if (pair := made.get(int(frame.producer[row]))) is not None]
        if not pairs:  # who made what it read is not known, as in other tools' dumps
            return self._history.parted
        return any(pair.a.number in self._real for pair in pairs)

    def _from_view(self, pair: Pair, row: int, change: float, made: float) -> Cause | None:
        own = roundoff(self.a.text("dtype", row))
        if change <= _VIEWED * (max(made, self._history.noise) + own) or pair.a.kind == "module":
            return None
        slot = self.a.text("slot", row)
        return Cause(
            "source", f"{slot} differs although what it is taken from agrees: another view (a transpose, a slice)"
        )

    def _from_outside(self, pair: Pair, row_a: int, row_b: int, change: float) -> Cause | None:
        name = self.a.text("name", row_a) or self.b.text("name", row_b)
        slot = self.a.text("slot", row_a)
        known = self._written.get(name, self._history.named.get(name))
        if known is None and self._late:
            return None  # the runs parted before, and nobody recorded what became of this
        if known is not None and (
            change <= _FOLLOWED * known + _STILL or (self._late and self._is_gathered(name, row_a))
        ):
            return None
        if not name and (self._history.parted or pair.a.kind == "module" or pair.a.phase == "backward"):
            return None  # it may be what a function that was not recorded made of differing values
        if change <= _STILL + _VIEWED * self._history.noise:
            return None
        if not name:
            return Cause("unknown", f"{slot} differs, and no recorded operator made it")
        dtypes = self.a.text("dtype", row_a), self.b.text("dtype", row_b)
        if dtypes[0] != dtypes[1]:
            return Cause("dtype", f"{name} is {dtypes[0]} against {dtypes[1]}")
        if self._begun.get(name) == 0.0 and not self._is_gathered(name, row_a):
            text = f"{slot} differs although {name} agrees, of which it is a view: another one (a transpose, a slice)"
            return Cause("source", text)
        called = name if name.startswith("input ") else f"its {name}"
        return Cause("source", f"{called} differs: {norms(self.a, self.b, row_a, row_b)}")

    def _is_gathered(self, name: str, row: int) -> bool:
        """Tell whether a row shows the whole of a parameter of which this rank holds a part: it differs where others' do."""
        return self._sizes.get(name, int(self.a.count[row])) != int(self.a.count[row])

    # -- keeping -------------------------------------------------------------------------------------------------

    def _remember(self, pair: Pair) -> None:
        """Keep how far apart a parameter or buffer is that was just written: the next step reads it."""
        for row, _ in pair.outputs:
            name = self.a.text("name", row)
            if name:
                self._written[name] = self.change_of[row]

    def _suspect(self, pair: Pair, cause: Cause, worst: float, explained: float, *, clean: bool) -> Suspect:
        node, frame = cause.lone or pair.a, self.b if cause.side == "b" else self.a
        slot = frame.text("slot", node.outputs[0]) if node.outputs else "out0"
        return Suspect(
            site=f"{node.site}.{slot}",
            rank=self._rank,
            step=self._step,
            reason=cause.reason,
            text=cause.text,
            score=worst / explained if explained else math.inf,
            change=worst,
            explained=explained,
            order=(self._step, pair.a.rows[-1]),
            side=cause.side,
            clean=clean,
            stack=int(frame.stack[node.rows[0]]),
            micro=node.micro,
            pair=None if cause.lone else pair,
        )
