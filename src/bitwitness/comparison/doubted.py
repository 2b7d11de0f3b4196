"""Operators that rounding of a coarse dtype might explain, and whose kept values are to be asked all the same.

Where two runs compute in different precisions, an operator's inputs differ, and what they explain grows along the depth. A
product that differs by several times what each of its inputs does is the one to compute again in float64, from its own inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.suspect import Suspect
from bitwitness.comparison.values import KeptValues
from bitwitness.oracle.names import PRODUCTS, canonical

_TIMES = 4.0
"""Times its inputs' changes. Healthy products were seen to differ by up to twice as much, in bfloat16 against float32."""
_LEAST = 2.0
"""Unit roundoffs of the coarser dtype that a product has to differ by."""


def contradicted(differences: Differences, values: KeptValues | None, rank: int, step: int) -> list[Suspect]:
    """Return the first such product that float64 contradicts, if there is one."""
    if values is None or differences.precisions is None or differences.parted_before:
        return []
    found = ((one, values.refine(one)) for one in _doubted(differences, rank, step))
    return next(([told] for one, told in found if told is not None and told is not one), [])


def _doubted(differences: Differences, rank: int, step: int) -> Iterator[Suspect]:
    """Yield such products in the order of execution."""
    least = _LEAST * differences.roundoff_inside
    for pair in differences.alignment.pairs:
        if pair.a.kind != "op" or canonical(pair.a.op) not in PRODUCTS or not pair.outputs or not pair.inputs:
            continue
        out, change = max(enumerate(differences.change_of[i] for i, _ in pair.outputs), key=lambda one: one[1])
        explained = max(least, _TIMES * max(differences.change_of[i] for i, _ in pair.inputs))
        if change > explained:
            yield Suspect(
                site=f"{pair.a.site}.{differences.a.text('slot', pair.outputs[out][0])}",
                rank=rank,
                step=step,
                reason="computed",
                text="it differs by more than its inputs and its rounding explain",
                score=change / explained,
                change=change,
                explained=explained,
                order=(step, pair.a.rows[-1]),
                stack=int(differences.a.stack[pair.a.rows[0]]),
                micro=pair.a.micro,
                pair=pair,
            )
