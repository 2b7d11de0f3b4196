"""Results whose norm rounding does not explain, behind another precision.

Rounding errors are random: they change single numbers by much, and the norm of many by next to nothing. And they multiply
nothing: a result that is one number times the other run's, all its statistics alike, of inputs that are not, was computed
otherwise. Nor do they grow tenfold in one operator. Deep in a model, where operators have much room, all this shows what was
computed wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from bitwitness.comparison.differences import FINE, Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.measuring.allowance import roundoff
from bitwitness.comparison.measuring.describe import RECORD_OPERATORS
from bitwitness.comparison.measuring.relation import factor, in_times, is_filled, numbers_of
from bitwitness.comparison.measuring.values import KeptValues
from bitwitness.comparison.suspect import Suspect, suspect_of
from bitwitness.oracle.names import PRODUCTS, canonical, is_random

_OF_INPUTS, _OF_CHANGE, _OF_ROUNDOFF = 2.0, 0.25, 0.5
"""Times its inputs' norms, their largest change and the coarser unit roundoff that the norm of a product may change by. Seen in
first steps in bfloat16, of thirty architectures: at the most 1.4e-3, a third of that bound."""
_LATER = 3.0
"""Times as much as in the first step that a norm may change by in a later one, in which weights have moved apart."""
_MANY, _SOME = 256, 128
"""Numbers, at least, that a norm is of, and that a change is seen in."""
_FAR = {"forward": 10.0, "backward": 48.0, "module": 48.0}
"""Times what inputs differ by, that a result does not. Seen in first steps, of fifty pairs: 5.6, in a backward 24 (a ReLU). The
last of a module of which no operators were recorded."""
_LEAST_BACK, _OF_CHANGE_BACK = 4.0, 0.5
"""Unit roundoffs, and times what the model's result differs by, that the norm of what comes back to it may change by."""
_JUMPS = {
    *("threshold_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward", "leaky_relu_backward"),
    *("round", "floor", "ceil", "trunc", "fix", "sign", "remainder", "fmod", "frac"),
}
"""Whose result takes another branch by a roundoff."""
_LEAST_FAR = 8.0
"""Unit roundoffs of the coarser dtype that it differs by then, at least."""
_LEAST_FACTOR = 8.0
"""Unit roundoffs of the coarser dtype, at least, that a factor is away from 1 by. Seen in healthy pairs: 6, of a bias."""
_LEAST_AWAY = 0.01
"""The same whatever the dtype. Seen in float16: 0.0044, of a convolution's weight."""
_SHARE, _MOST = 0.25, 0.4
"""Of a factor's distance from 1 (of the second at most): how far its statistics may be from it, and its inputs from 1."""
_ELEMENTS = 16
"""Of fewer numbers a factor says nothing."""


def wrong_norm(differences: Differences, values: KeptValues | None, rank: int, step: int) -> list[Suspect]:
    """Return the first operator or module whose result has a norm that its inputs' do not explain, if there is one."""
    if differences.precisions is None or differences.parted_before or differences.roundoff_inside <= FINE:
        return []
    found = _suspects(differences, rank, step) if differences.has_operators else _of_modules(differences, rank, step)
    told = found if values is None else (one for one in map(values.refine, found) if one is not None)
    return next(([one] for one in told), [])


def _of_modules(differences: Differences, rank: int, step: int) -> Iterator[Suspect]:
    """Yield modules, and what comes back to the model's result of a loss of which no operators tell."""
    yield from _suspects(differences, rank, step)
    returned = [rows for pair in differences.alignment.pairs if pair.is_root("forward") for rows in pair.outputs]
    if not returned:
        return
    changes = (
        max(differences.change_of[i] for i, _ in returned),
        max(abs(_ratio(differences, *rows) - 1) for rows in returned),
    )
    unit = differences.slack * differences.roundoff_inside
    explained = _LEAST_BACK * unit + _OF_INPUTS * changes[1] + _OF_CHANGE_BACK * changes[0]
    for pair in differences.alignment.pairs:
        for rows in pair.inputs if pair.is_root("backward") else ():
            away = abs(_ratio(differences, *rows) - 1.0)
            if differences.a.count[rows[0]] >= _ELEMENTS and explained < away < math.inf:
                times = f"its norm is {_ratio(differences, *rows):.4g} times as large in run B"
                text = (
                    f"what comes back to the model's result differs ({times}), and the result agrees within rounding: "
                    f"the loss is computed otherwise, or of other targets: {RECORD_OPERATORS}"
                )
                yield suspect_of(
                    pair, differences.a, rows[0], rank=rank, step=step, reason="loss", text=text, change=away,
                    explained=explained,
                )  # fmt: skip


def _suspects(differences: Differences, rank: int, step: int) -> Iterator[Suspect]:
    """Yield them in the order of execution."""
    leaves = _leaves(differences)
    for pair in differences.alignment.pairs:
        masked = any(is_filled(differences.a, row) for row, _ in pair.inputs)
        if not pair.inputs or masked or differences.is_cancelled(pair):
            continue
        for rows in pair.outputs:
            found = _multiplied(differences, pair, rows)
            if found is None and _is_one_operation(pair, leaves):
                found = _of_another_norm(differences, pair, rows)
            found = found or _by_far(differences, pair, rows)
            if found is not None:
                yield suspect_of(
                    pair, differences.a, rows[0], rank=rank, step=step, reason="computed",
                    text=f"its inputs agree {_how_far(differences, pair)}, and its result {found.how}",
                    change=found.away, explained=found.explained,
                )  # fmt: skip


def _how_far(differences: Differences, pair: Pair) -> str:
    """Say up to what a node's inputs are known to agree: statistics do not tell the order of what lies otherwise in memory."""
    a, b = differences.a, differences.b
    other = [i for i, j in pair.inputs if a.text("layout", i) != b.text("layout", j)]
    if differences.has_values or not other:
        return "within rounding"
    slot = a.text("slot", other[0])
    return f"in their statistics ({slot} lies otherwise in memory in each run, and may hold the same values in another order)"


class _Away(NamedTuple):
    """How a result is another one, by how much, and up to where rounding explains it."""

    how: str
    away: float
    explained: float


def _multiplied(differences: Differences, pair: Pair, rows: tuple[int, int]) -> _Away | None:
    """Return by what number a result is multiplied in run B, if it is and its inputs are not."""
    explained = max(_LEAST_FACTOR * differences.roundoff_inside, _LEAST_AWAY) * differences.slack
    away = abs(_ratio(differences, *rows) - 1.0)
    if differences.a.count[rows[0]] < _ELEMENTS or not explained <= away < math.inf or _adds_up(differences, pair):
        return None
    times = factor(differences.a, rows[0], differences.b, rows[1], _SHARE * min(away, _MOST))
    if times is None or times <= 0 or _inputs_away(differences, pair) > _SHARE * abs(times - 1.0):
        return None
    return _Away(f"is {in_times(times)} as large in run B", away, explained)


def _of_another_norm(differences: Differences, pair: Pair, rows: tuple[int, int]) -> _Away | None:
    """Return how many times as large a result's norm is, if its inputs' norms and changes do not explain that."""
    change = max(differences.change_of[i] for i, _ in pair.inputs)
    rounded = _OF_ROUNDOFF * differences.slack * differences.roundoff_inside
    explained = rounded + _OF_INPUTS * _inputs_away(differences, pair) + _OF_CHANGE * change
    explained *= 1.0 if differences.earlier.last is None else _LATER
    ratio = _ratio(differences, *rows)
    if differences.a.count[rows[0]] < _MANY or not explained < abs(ratio - 1.0) < math.inf:
        return None
    return _Away(f"does not: its norm is {ratio:.4g} times as large in run B", abs(ratio - 1.0), explained)


def _by_far(differences: Differences, pair: Pair, rows: tuple[int, int]) -> _Away | None:
    """Return that an operator's first result differs by many times what its inputs do."""
    alone = (pair.a.kind, pair.a.phase) == ("module", "forward") and not differences.has_operators
    jumps = is_random(pair.a.op) or canonical(pair.a.op) in _JUMPS or not roundoff(differences.a.text("dtype", rows[0]))
    if not (pair.a.kind == "op" or alone) or rows != pair.outputs[0] or jumps:
        return None
    unit = differences.slack * differences.roundoff_inside
    change, carried = differences.change_of[rows[0]], max(unit, *(differences.change_of[i] for i, _ in pair.inputs))
    explained = _FAR["module" if alone else pair.a.phase] * carried * _cancelled(differences, pair, rows[0])
    if differences.a.count[rows[0]] < _SOME or change <= max(_LEAST_FAR * unit, explained):
        return None
    return _Away(f"does not: it differs by {change / carried:.0f} times what they do", change, explained)


def _cancelled(differences: Differences, pair: Pair, row: int) -> float:
    """Return how many times as large as its result the operands of a sum are: so much more of their rounding is left in it."""
    size = numbers_of(differences.a, row).l2
    if canonical(pair.a.op) not in ("add", "sub") or not size:
        return 1.0
    return max(1.0, *(numbers_of(differences.a, i).l2 / size for i, _ in pair.inputs))


def _is_one_operation(pair: Pair, leaves: Collection[str]) -> bool:
    """Return whether a node is a product of the forward, or a module around no others: what little changes the norm of."""
    if pair.a.phase != "forward":
        return False
    return pair.a.module in leaves if pair.a.kind == "module" else canonical(pair.a.op) in (*PRODUCTS, "attention")


def _leaves(differences: Differences) -> set[str]:
    """Return the modules that others were not seen in."""
    paths = {pair.a.module for pair in differences.alignment.pairs if pair.a.kind == "module"}
    around = {path.rpartition(".")[0] for path in paths} | {"."}
    return paths - around


def _adds_up(differences: Differences, pair: Pair) -> bool:
    """Return whether what a node reads may cancel in its result: a sum, that rounding changes by any factor."""
    if pair.a.kind == "module" or canonical(pair.a.op) in PRODUCTS:
        return False
    counts = [max((int(differences.a.count[i]) for i, _ in rows), default=0) for rows in (pair.inputs, pair.outputs)]
    return pair.a.kind != "op" or counts[1] < counts[0]


def _inputs_away(differences: Differences, pair: Pair) -> float:
    return max(abs(_ratio(differences, *rows) - 1.0) for rows in pair.inputs)


def _ratio(differences: Differences, row_a: int, row_b: int) -> float:
    """Return how many times as large run B's norm is; 1 where both are zero, infinite where run A's is."""
    first, second = numbers_of(differences.a, row_a).l2, numbers_of(differences.b, row_b).l2
    return second / first if first else (math.inf if second else 1.0)
