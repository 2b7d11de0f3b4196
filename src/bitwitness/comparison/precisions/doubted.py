"""Operators that rounding of a coarse dtype might explain, and which are to be asked all the same.

Where two runs compute in different precisions, an operator's inputs differ, and what they explain grows along the depth. A
result that differs by several times what each of its inputs does is the one to compute again in float64, from its own inputs.
And rounding multiplies nothing: a result that is one number times the other run's, all its statistics alike, of inputs that are
not, was computed otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from bitwitness.comparison.differences import FINE, Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.measuring.relation import factor, in_times, numbers_of
from bitwitness.comparison.measuring.values import KeptValues
from bitwitness.comparison.suspect import Suspect
from bitwitness.oracle.names import PRODUCTS, canonical, is_random

_TIMES = 4.0
"""Times its inputs' changes. Healthy products were seen to differ by up to twice as much, in bfloat16 against float32."""
_LEAST = 2.0
"""Unit roundoffs of the coarser dtype that it has to differ by."""
_LEAST_FACTOR = 4.0
"""Unit roundoffs of the coarser dtype, at least, that a factor is away from 1 by."""
_SHARE = 0.25
"""Of a factor's distance from 1: how far its statistics may be from it, and how far its inputs may be from having one."""
_MOST = 0.4
"""Of a factor's distance from 1, as much of it as that share is taken of."""
_ELEMENTS = 16
"""Of fewer numbers a factor says nothing."""


def contradicted(differences: Differences, values: KeptValues | None, rank: int, step: int) -> list[Suspect]:
    """Return the first operator that float64 contradicts, if there is one."""
    if values is None or differences.precisions is None or differences.parted_before:
        return []
    found = ((one, values.refine(one)) for one in _doubted(differences, rank, step))
    return next(([told] for one, told in found if told is not None and told is not one), [])


def _doubted(differences: Differences, rank: int, step: int) -> Iterator[Suspect]:
    """Yield the operators to compute again, in the order of execution."""
    least = _LEAST * differences.roundoff_inside
    for pair in differences.alignment.pairs:
        if pair.a.kind != "op" or not pair.outputs or not pair.inputs or is_random(pair.a.op):
            continue
        out, change = max(enumerate(differences.change_of[i] for i, _ in pair.outputs), key=lambda one: one[1])
        explained = max(least, _TIMES * max(differences.change_of[i] for i, _ in pair.inputs))
        if change > explained:
            yield _suspect(
                differences,
                pair,
                out,
                "it differs by more than its inputs and its rounding explain",
                explained,
                rank,
                step,
            )


def multiplying(differences: Differences, rank: int, step: int) -> list[Suspect]:
    """Return the first operator or module whose result is one number times the other run's, of inputs that are not."""
    if differences.precisions is None or differences.parted_before or differences.roundoff_inside <= FINE:
        return []
    return list(islice(_multiplying(differences, rank, step), 1))


def _multiplying(differences: Differences, rank: int, step: int) -> Iterator[Suspect]:
    for pair in differences.alignment.pairs:
        if not pair.inputs or differences.is_cancelled(pair) or _adds_up(differences, pair):
            continue
        for out, rows in enumerate(pair.outputs):
            times = _multiplied_by(differences, rows)
            apart = max(abs(_ratio(differences, *one) - 1.0) for one in pair.inputs)
            if times is not None and apart <= _SHARE * abs(times - 1.0):
                text = f"its inputs agree within rounding, and its result is {in_times(times)} as large in run B"
                explained = _least_factor(differences)
                yield _suspect(differences, pair, out, text, explained, rank, step)


def _adds_up(differences: Differences, pair: Pair) -> bool:
    """Return whether what a node reads may cancel in its result: a sum, that rounding changes by any factor."""
    if pair.a.kind == "module" or canonical(pair.a.op) in PRODUCTS:
        return False
    counts = [max((int(differences.a.count[i]) for i, _ in rows), default=0) for rows in (pair.inputs, pair.outputs)]
    return pair.a.kind != "op" or counts[1] < counts[0]


def _multiplied_by(differences: Differences, rows: tuple[int, int]) -> float | None:
    """Return the number that a result is multiplied by in run B, by more than rounding is; None where it is by none."""
    away = abs(_ratio(differences, *rows) - 1.0)
    if differences.a.count[rows[0]] < _ELEMENTS or not _least_factor(differences) <= away < 1e6:
        return None
    times = factor(differences.a, rows[0], differences.b, rows[1], _SHARE * min(away, _MOST))
    return times if times is not None and times > 0 else None


def _least_factor(differences: Differences) -> float:
    return (
        _LEAST_FACTOR * differences.slack * differences.roundoff_inside
    )  # later also of weights that were moved apart


def _ratio(differences: Differences, row_a: int, row_b: int) -> float:
    """Return how many times as large run B's norm is; 1 where both are zero."""
    first, second = numbers_of(differences.a, row_a).l2, numbers_of(differences.b, row_b).l2
    return second / first if first else 1.0 + second


def _suspect(
    differences: Differences, pair: Pair, out: int, text: str, explained: float, rank: int, step: int
) -> Suspect:
    row = pair.outputs[out][0]
    change = differences.change_of[row]
    return Suspect(
        site=f"{pair.a.site}.{differences.a.text('slot', row)}",
        rank=rank,
        step=step,
        reason="computed",
        text=text,
        score=change / explained,
        change=change,
        explained=explained,
        order=(step, pair.a.rows[-1]),
        stack=int(differences.a.stack[pair.a.rows[0]]),
        micro=pair.a.micro,
        pair=pair,
    )
