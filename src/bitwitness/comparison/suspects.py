"""Which operators made the difference: error that was made here apart from error that was handed on.

Nodes are looked at in the order of execution. A node is a *suspect* if its results differ by more than rounding explains, and
there is a reason for it (`comparison.reasons`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from bitwitness.comparison.differences import NEGLIGIBLE, Differences
from bitwitness.comparison.gradients.absent import absences
from bitwitness.comparison.gradients.updates import Updates
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.measuring.allowance import allowed
from bitwitness.comparison.measuring.relation import is_filled
from bitwitness.comparison.noted import of_absence, of_cause
from bitwitness.comparison.precisions.which import room_of
from bitwitness.comparison.reasons.handed import hands_on
from bitwitness.comparison.reasons.inputs import Reasons
from bitwitness.comparison.reasons.own import OwnReasons
from bitwitness.comparison.reasons.reason import Reason
from bitwitness.comparison.rewriting.harmless import Harmless
from bitwitness.comparison.rewriting.inside import APART, Inside, computes_another
from bitwitness.comparison.rewriting.settled import SettledModules
from bitwitness.comparison.suspect import Exceeding, Suspect

_UNSEEN = 1e-12
_RETURNED = ("module", "forward")
_ILL_CONDITIONED = 1000.0
"""Unit roundoffs: a result for which so much is explained says nothing about the noise of the others."""
_LARGEST_NOISE = 0.05
"""The same as a relative change, for dtypes whose unit roundoff is large: 1,000 of bfloat16's would be 400 %."""


class SuspectSearch:
    """Goes through one step of one rank; `suspects` yields what it finds, in order.

    Parameters
    ----------
    differences
        The step's changes, and what is known of the rank's earlier steps.
    rank, step
        Where they are from.

    """

    def __init__(self, differences: Differences, rank: int, step: int) -> None:
        self.differences = differences
        self._reasons = Reasons(differences)
        self._own_reasons = OwnReasons(differences)
        self._earlier = differences.earlier
        self._rank = rank
        self._step = step
        self._named_modules: set[str] = set()
        self._recorded = Inside(differences)
        self._hidden: dict[int, float] = {}
        self._inside: dict[tuple[str, str, int], float] = {}
        self.settled = SettledModules(differences)
        self._harmless = Harmless(differences, self.settled)
        self._out = 0  # which of its results the node that is looked at differs in most
        self._updates = Updates(differences, self._reasons, self.settled)
        self.exceeding: list[Exceeding] = []
        """What differs by more than is explained, and has no reason of its own, in order."""
        self.cleared = 0
        """How many operators differ by more than is explained inside modules whose results agree."""
        self.unexplained: Exceeding | None = None
        """The first that differs by more than is explained, whatever was found of it."""
        self.apart: dict[str, Suspect] = {}
        """Modules whose inputs agree and whose results do not, by path: where nothing inside can be named, they are."""
        self.made_up_for: Exceeding | None = None
        """The first module that returns something else, of which nothing is left in what a module around it returns."""
        self.nearest: Exceeding | None = None
        """What came nearest to what is explained, of all that stayed within."""

    def suspects(self) -> Iterator[Suspect]:
        """Yield the suspects in the order of execution; what happened to all gradients comes last."""
        state = [pair for pair in self.differences.alignment.pairs if pair.a.kind in ("parameter", "buffer")]
        for pair in self.differences.alignment.pairs:
            if pair.a.kind in ("parameter", "buffer"):
                continue  # what reads them is looked at first
            suspect = self._look(pair)
            self._reasons.remember(pair)
            if suspect is not None and self._harmless.holds(pair, suspect):
                self.cleared += suspect.change > suspect.explained
                continue
            if suspect is not None and not (pair.a.kind == "module" and self._is_named_inside(pair.a.module)):
                self._earlier.parted = True
                self._named_modules.add(suspect.site.partition("/")[0])
                yield self._harmless.behind(pair, suspect)
        for pair in state:
            if (reason := self._reasons.of_state(pair)) is not None and not self.settled.stored_otherwise(pair):
                self._earlier.parted = True
                change = self.differences.change_of[pair.outputs[0][0]]
                yield self._suspect(pair, reason, change, NEGLIGIBLE, clean=True)
        for one in () if self.differences.parted_before else absences(self.differences):
            self._earlier.parted = True
            yield of_absence(one, self.differences, self._rank, self._step)
        if (cause := self._updates.cause) is not None:
            self._earlier.parted = True
            yield of_cause(cause, self._rank, self._step)
        self._earlier.named = self._reasons.named
        left = self.settled.left_of(self.exceeding)
        self.cleared, self.exceeding = self.cleared + len(self.exceeding) - len(left), left
        self.unexplained = next(iter(self.settled.left_of([self.unexplained] if self.unexplained else [])), None)
        self._earlier.parted |= bool(left)

    def _is_named_inside(self, path: str) -> bool:
        """Return whether something inside a module was named already: the module's own difference is that."""
        return (path == "." and bool(self._named_modules)) or any(
            named == path or named.startswith(path + ".") for named in self._named_modules
        )

    def _look(self, pair: Pair) -> Suspect | None:
        """Return a node as a suspect, if it is one; note how far its results are apart."""
        differences = self.differences
        results = [differences.change_of[row] for row, _ in pair.outputs]
        differences.largest[pair.a.number] = max(results, default=0.0)
        if pair.a.kind == "optimizer":
            self._earlier.note_read(pair.a.module, [differences.change_of[row] for row in self._read(pair)])
        if any(is_filled(differences.a, row) for row, _ in pair.outputs):
            self._hidden[pair.a.number] = max(self._carried(pair), default=0.0)
        if not any(results) or self._is_no_counterpart(pair):
            edited = self._updates.of_vain_edit(pair) if results and not any(results) else None
            return edited and self._suspect(pair, edited, 0.0, NEGLIGIBLE, clean=True)
        # By noise that was seen so far, and by what the inputs brought along; rounding alone explains less.
        explained, worst, self._out = self._worst(pair, results)
        if not pair.inputs:
            return self._without_inputs(pair, worst)
        if pair.a.kind == "optimizer" and (found := self._updates.of_update(pair)) is not None:
            return self._suspect(pair, found, worst, NEGLIGIBLE, clean=True)
        differing = any(differences.is_real(pair.a, row) for row, _ in pair.inputs)
        self._weigh(pair, worst, explained, differing=differing)
        if pair.a.kind == "module" and self.settled.agrees(pair):
            self._clear(pair)
        if pair.a.kind == "collective" or (pair.a.kind == "module" and self._recorded.is_seen(pair)):
            return None  # the one computes nothing, the other's operators are looked at themselves
        if pair.a.kind == "module" and self._reasons.moved:
            return None  # its parts read other weights
        reason = self._reasons.of_inputs(pair) if worst > 0 and pair.a.kind != "optimizer" else None
        rounding = self._rounding(pair)
        if reason is not None and (reason.kind != "view" or worst > max(differences.noise_limit(), rounding)):
            differences.real.add(pair.a.number)
            return self._suspect(pair, reason, worst, rounding, clean=False)
        return self._own(pair, worst, explained, clean=not differing)

    def _is_no_counterpart(self, pair: Pair) -> bool:
        """Return whether two nodes cannot be held against each other; what reads two operators that cannot is not accused."""
        unlike = self.differences.returns_another(pair) or self.settled.lies_otherwise(pair)
        if computed := not unlike and computes_another(self.differences, pair):
            self.differences.real.add(pair.a.number)
        return unlike or computed

    def _weigh(self, pair: Pair, worst: float, explained: float, *, differing: bool) -> None:
        """Note whether a node's results differ by more than rounding, or how much rounding there is."""
        differences = self.differences
        # What reads a real difference has one, too, even where it is small: else the next reader would look like its maker.
        if worst > explained or (differing and worst > 0 and pair.a.number not in self._harmless.ends):
            differences.real.add(pair.a.number)
            self._recorded.real.add(pair.a.module)
            innocent = differences.is_cancelled(pair) or self.settled.holds(pair) or self.settled.orders_otherwise(pair)
            if innocent and self.made_up_for is None and worst > explained and (pair.a.kind, pair.a.phase) == _RETURNED:
                self.made_up_for = self._exceeding(pair, worst, explained)
            if self.unexplained is None and worst > explained and not innocent:
                self.unexplained = self._exceeding(pair, worst, explained)
            inner = (pair.a.kind, pair.a.phase) == _RETURNED and pair.a.module != "." and self._recorded.is_seen(pair)
            clean = not (differing or innocent or differences.parted_before)
            if worst > explained and inner and clean:
                self.apart[pair.a.module] = self._suspect(pair, Reason("computed", APART), worst, explained, clean=True)
            return
        self._note_inside(pair, worst)
        if 0 < worst < explained < math.inf and (self.nearest is None or worst / explained > self.nearest.ratio):
            self.nearest = self._exceeding(pair, worst, explained)
        if explained <= min(_LARGEST_NOISE, _ILL_CONDITIONED * differences.roundoff(*pair.outputs[0])):
            self._earlier.noise = max(self._earlier.noise, worst)

    def _clear(self, module: Pair) -> None:
        """Trust what a module returns, if its results agree: what reads them has equal inputs, whatever made them inside."""
        makers = {int(self.differences.a.producer[row]) for row, _ in module.outputs}
        self.differences.real -= {module.a.number, *makers}

    def _own(self, pair: Pair, worst: float, explained: float, *, clean: bool) -> Suspect | None:
        """Return a node as a suspect whose inputs are no reason of its difference."""
        reason = self._own_reasons.of(pair, worst, explained)
        follows = pair.a.kind == "optimizer" and (self._updates.cause or self.differences.is_cancelled(pair))
        if follows and (reason is None or reason.kind == "computed"):
            return None  # of what happened to all gradients, unless it has another learning rate or the like
        if reason is None:
            if worst > explained and not self.differences.is_cancelled(pair) and not self.settled.holds(pair):
                self.exceeding.append(self._exceeding(pair, worst, explained))
            return None
        # Another reason than rounding is weighed against rounding alone, not against what its own inputs explain.
        if reason.kind != "computed":
            explained = min(explained, self._rounding(pair))
        return self._suspect(pair, reason, worst, explained, clean=clean)

    def _exceeding(self, pair: Pair, change: float, explained: float) -> Exceeding:
        slot = self.differences.a.text("slot", pair.outputs[self._out][0])
        return Exceeding(f"{pair.a.site}.{slot}", self._rank, self._step, change, explained)

    def _rounding(self, pair: Pair) -> float:
        """Return what a node's own rounding explains, with equal inputs."""
        return self._allowed(pair, 0, [0.0] * len(pair.inputs))

    def _allowed(self, pair: Pair, out: int, carried: list[float]) -> float:
        differences, inside = self.differences, max(self.differences.roundoff_inside, self.differences.rewritten)
        return room_of(pair, differences.precisions) * allowed(differences.a, differences.b, pair, out, carried, inside)

    def _worst(self, pair: Pair, results: list[float]) -> tuple[float, float, int]:
        """Return what is explained and what is seen, of the result that exceeds it most, and which that is."""
        differences = self.differences
        carried = self._carried(pair)
        noisy = [c if c == 0.0 else max(c, self._earlier.noise) for c in carried]
        best = (math.inf, 0.0, 0)
        for i, change in enumerate(results):
            explained = max(differences.slack * self._allowed(pair, i, noisy), differences.drifted)
            ratio = change / explained if explained else math.inf
            if i == 0 or ratio > best[1] / best[0]:
                best = (explained, change, i)
        explained, change, i = best
        if change <= explained or not hands_on(differences, pair):
            return best
        self._updates.turned = max(self._updates.turned, min(change, 1.0) * (pair.a.phase == "backward"))
        return change, change, i

    def _carried(self, pair: Pair) -> list[float]:
        """Return the change of each of a node's inputs; of one that is masked, that of what was masked."""
        differences = self.differences
        makers = [int(differences.a.producer[row]) for row, _ in pair.inputs]
        changes = [differences.change_of[row] for row, _ in pair.inputs]
        inside = self._inside.get((pair.a.module, pair.a.phase, pair.a.micro), 0.0) if pair.a.kind == "module" else 0.0
        if pair.a.kind == "optimizer":
            # Where there is rounding, statistics that agree leave room for gradients that are rounding errors alone.
            unseen = _UNSEEN if self._earlier.noise and not differences.has_values else 0.0
            read, rows = max(self._earlier.read.get(pair.a.module, 0.0), unseen), self._read(pair)
            changes = [
                max(c, read) if row in rows and not differences.a.hashed[row] else c
                for c, (row, _) in zip(changes, pair.inputs, strict=True)
            ]
        return [max(change, self._hidden.get(made, 0.0), inside) for change, made in zip(changes, makers, strict=True)]

    def _read(self, update: Pair) -> list[int]:
        """Return the rows, in A, of the gradients that an update reads."""
        return [row for row, _ in update.inputs if self.differences.a.text("slot", row) == "grad"]

    def _note_inside(self, pair: Pair, change: float) -> None:
        """Note what rounding changed in a module's results for those around it: theirs are made of them."""
        if pair.a.kind != "module" or change == 0.0:
            return
        path = pair.a.module
        while path != ".":
            path = path.rpartition(".")[0] or "."
            place = path, pair.a.phase, pair.a.micro
            self._inside[place] = max(self._inside.get(place, 0.0), change)

    def _without_inputs(self, pair: Pair, worst: float) -> Suspect | None:
        """Return a value that stands alone as a suspect, if it is one: a gradient, a saved point."""
        differences, number = self.differences, pair.a.number
        if pair.is_loss and (differences.makers.other_losses or math.isinf(worst)):
            return None  # one run's is a sum, or goes back in pieces
        if pair.a.kind == "op":
            differences.real.add(number)
            reason = self._own_reasons.of(pair, worst, NEGLIGIBLE)
            return None if reason is None else self._suspect(pair, reason, worst, NEGLIGIBLE, clean=True)
        if pair.a.kind == "collective":
            differences.real.add(number)
            return None  # it delivers what another rank differs in
        limit = self._updates.limit(pair)
        told = pair.a.kind == "gradient" and self._updates.cause is not None
        known = self._earlier.parted or self._reasons.moved
        if known or worst <= limit or told or differences.is_cancelled(pair) or self._updates.edited_elsewhere(pair):
            return None
        differences.real.add(number)
        reason = self._updates.of_value(pair)
        if reason is None:
            self.exceeding.append(self._exceeding(pair, worst, limit))
            return None
        return self._suspect(pair, reason, worst, limit, clean=True)

    def _suspect(self, pair: Pair, reason: Reason, worst: float, explained: float, *, clean: bool) -> Suspect:
        node = reason.lone or pair.a
        frame = self.differences.b if reason.side == "b" else self.differences.a
        out = self._out if node is pair.a and self._out < len(node.outputs) else 0
        slot = frame.text("slot", node.outputs[out]) if node.outputs else "out0"
        return Suspect(
            site=f"{node.site}.{slot}", rank=self._rank, step=self._step, reason=reason.kind, text=reason.text,
            score=worst / explained if explained else math.inf,
            change=worst,
            explained=explained,
            order=(self._step, pair.a.rows[-1]),
            side=reason.side,
            clean=clean,
            stack=int(frame.stack[node.rows[0]]),
            micro=node.micro,
            pair=None if reason.lone else pair,
            lone=reason.lone,
            rows=reason.rows,
        )  # fmt: skip
