"""The kept tensors of one step of two runs: compared once each, on all cores, and asked again where a suspect is looked at."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from bitwitness.comparison.matching.align import Alignment, Pair
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.measuring.order import order_in_words
from bitwitness.comparison.measuring.tensors import same_bits, tensor_metrics
from bitwitness.comparison.suspect import Suspect
from bitwitness.errors import UsageError
from bitwitness.numerics import ErrorMetrics
from bitwitness.oracle.recorded import compare_recorded_with_float64
from bitwitness.oracle.worst import WorstElement
from bitwitness.store.source import Source

EQUAL = ErrorMetrics(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 1.0, 1.0, 0, 0)
# Times what rounding allows (`oracle.recorded`) from which on an error was made here: that bound is of the usual size of
# errors, and the worst of millions of elements is compared with it.
_SURE = 4.0


@dataclass(frozen=True, slots=True)
class Side:
    """One run's step: where its rows are and who can read their tensors."""

    source: Source
    frame: StepFrame
    rank: int

    def has(self, row: int) -> bool:
        """Return whether a row's value was kept."""
        return bool(self.frame.texts["tensor"].codes[row] >= 0)

    def load(self, row: int) -> torch.Tensor:
        """Return a row's kept value; raises `UsageError` if it cannot be read."""
        frame = self.frame
        found = self.source.tensor(
            self.rank,
            frame.text("tensor", row),
            frame.stored.at(row),
            frame.shapes[row],
            frame.texts["layout"][row],
        )
        return found if frame.factors is None or frame.factors[row] == 1.0 else found * float(frame.factors[row])


class KeptValues:
    """Compares the kept values of two steps.

    Attributes
    ----------
    problems
        What could not be read, one sentence each.

    """

    def __init__(self, a: Side, b: Side) -> None:
        self._a = a
        self._b = b
        self._metrics: dict[tuple[int, int, str, str], ErrorMetrics | None] = {}
        self._errors: dict[tuple[bool, int], WorstElement | None] = {}
        self.problems: list[str] = []

    @property
    def any(self) -> bool:
        """Whether both runs kept values."""
        return all(bool((side.frame.texts["tensor"].codes >= 0).any()) for side in (self._a, self._b))

    def compare(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Compare rows, each distinct pair of values once."""
        wanted = {self._key(i, j): (i, j) for i, j in pairs if self._a.has(i) and self._b.has(j)}
        todo = [(key, rows) for key, rows in wanted.items() if key not in self._metrics]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            for (key, _), found in zip(todo, pool.map(self._one, [rows for _, rows in todo]), strict=True):
                self._metrics[key] = found

    def metrics(self, row_a: int, row_b: int) -> ErrorMetrics | None:
        """Return how far two rows' values are apart; None if that is not known."""
        return self._metrics.get(self._key(row_a, row_b))

    def changes(self, found: dict[tuple[int, int], float], whole: bool) -> dict[tuple[int, int], float]:
        """Return the relative changes of pairs of rows: by their values where both were kept, else as they are.

        ``whole``: an element that differs counts by its share in the whole, beside what statistics show.
        """
        exact = {}
        for rows, change in found.items():
            metrics = self.metrics(*rows)
            if metrics is None:
                exact[rows] = change
            elif whole and metrics is not EQUAL:
                exact[rows] = max(change, _of_all(metrics))
            else:
                exact[rows] = _change(metrics, self._a.frame, rows[0])
        return exact

    def _key(self, row_a: int, row_b: int) -> tuple[int, int, str, str]:
        layouts = (side.frame.text("layout", row) for side, row in ((self._a, row_a), (self._b, row_b)))
        first, second = layouts
        return int(self._a.frame.value[row_a]), int(self._b.frame.value[row_b]), first, second

    def _one(self, rows: tuple[int, int]) -> ErrorMetrics | None:
        try:
            a, b = self._a.load(rows[0]), self._b.load(rows[1])
            if a.shape != b.shape or a.is_complex() != b.is_complex():
                return None  # which is a difference, and no failure to read
            return EQUAL if same_bits(a, b) else tensor_metrics(a, b)
        except (UsageError, OSError, RuntimeError, ValueError) as error:
            self.problems.append(f"{self._a.frame.text('module', rows[0])}: not compared: {error}")
            return None

    # -- a closer look -------------------------------------------------------------------------------------------

    def refine(self, suspect: Suspect) -> Suspect | None:
        """Recompute a suspect in float64 from each run's own inputs; None if neither run made an error."""
        pair = suspect.pair
        if suspect.rows is not None:
            return self._with_order(suspect, suspect.rows)
        if suspect.reason != "computed" or pair is None:
            return suspect
        if pair.a.kind != "op":
            return suspect if suspect.clean else None
        errors = {"A": self._error(self._a, pair, first=True), "B": self._error(self._b, pair, first=False)}
        known = {side: error for side, error in errors.items() if error is not None}
        if len(known) < 2:  # then statistics have the word, and they say little where inputs differ
            return suspect if suspect.clean else None
        guilty = {side: error for side, error in known.items() if error.ratio > _SURE}
        if not guilty:  # a ratio that is no number convicts nobody, and clears nobody
            right = all(error.ratio <= _SURE for error in known.values())
            # From the very same inputs two right results are two computations: arguments that were not recorded.
            return None if right and not self._same_inputs(pair) else suspect
        side, worst = max(guilty.items(), key=lambda item: item[1].ratio)
        text = (
            f"run {side} computed it wrongly: {worst.value:.9g} at element {worst.at}, where float64 gives "
            f"{worst.expected:.9g} from the same inputs ({_times(worst.ratio)} what rounding allows)"
        )
        if len(guilty) == 1:
            text += f"; run {'B' if side == 'A' else 'A'} is within rounding"
        return replace(suspect, text=text, score=worst.ratio)

    def _with_order(self, suspect: Suspect, rows: tuple[int, int]) -> Suspect:
        """Say of values that differ in which order they lie, if they are the same ones."""
        if not (self._a.has(rows[0]) and self._b.has(rows[1])):
            return suspect
        try:
            words = order_in_words(self._a.load(rows[0]), self._b.load(rows[1]))
        except (UsageError, OSError, RuntimeError, ValueError):
            return suspect  # told where it was compared
        return suspect if words is None else replace(suspect, text=f"{suspect.text}: run B's is run A's {words}")

    def right(self, pair: Pair) -> bool:
        """Return whether float64 finds both runs' results of an operator right, each from its own inputs."""
        errors = (self._error(self._a, pair, first=True), self._error(self._b, pair, first=False))
        return all(error is not None and error.ratio <= _SURE for error in errors)

    def _same_inputs(self, pair: Pair) -> bool:
        metrics = [self.metrics(*rows) for rows in pair.inputs]
        return bool(metrics) and all(one is EQUAL for one in metrics)

    def _error(self, side: Side, pair: Pair, *, first: bool) -> WorstElement | None:
        """Return how far one run's results are from float64's, of each operator once; None where that is not known."""
        node = pair.a if first else pair.b
        key = first, node.number
        if key not in self._errors:
            self._errors[key] = self._by_float64(side, node)
        return self._errors[key]

    def _by_float64(self, side: Side, node: Node) -> WorstElement | None:
        frame = side.frame
        if any(not side.has(row) for row in node.rows):
            return None  # without all of its inputs an operator cannot be run
        try:
            inputs = [side.load(row) for row in node.inputs]
            errors = [
                compare_recorded_with_float64(
                    frame.text("args", node.rows[0]), inputs, side.load(row), int(frame.text("slot", row)[3:])
                )
                for row in node.outputs
                if frame.text("slot", row)[3:].isdigit()
            ]
        except UsageError as error:
            self.problems.append(str(error))
            return None
        known = [error for error in errors if error is not None]
        return max(known, key=lambda error: error.ratio) if known else None


def _of_all(metrics: ErrorMetrics) -> float:
    if metrics.nan_mismatch or metrics.inf_mismatch:
        return math.inf
    # Where run B holds zeros, all of it differs, and no more than that: small gradients of float16 are lost.
    return metrics.l2_relative if math.isfinite(metrics.l2_relative) else 1.0


def _change(metrics: ErrorMetrics, frame: StepFrame, row: int) -> float:
    top = max(abs(float(frame.numbers["min"][row])), abs(float(frame.numbers["max"][row])), 0.0)
    local = metrics.max_abs / top if top and math.isfinite(top) else 0.0
    return max(_of_all(metrics), local)


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if math.isfinite(ratio) else "infinitely more than"


def kept_values(a: Side, b: Side, alignment: Alignment) -> KeptValues | None:
    """Compare the values themselves, where both runs kept them."""
    values = KeptValues(a, b)
    if not values.any:
        return None
    values.compare(rows for pair in alignment.pairs for rows in (*pair.inputs, *pair.outputs))
    return values
