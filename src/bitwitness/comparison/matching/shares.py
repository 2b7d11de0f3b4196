"""Whether the ranks of two runs share one batch out otherwise: each reads other samples, and all together the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.store.source import Source

_SAME = 1e-9  # relative difference of sums in float64 that are of the same values in another order
Totals = tuple[float, float, float]
"""Of one input on one rank: how many values, their sum, and the sum of their squares."""


def shared_out_otherwise(a: Source, b: Source, ranks: Sequence[int]) -> bool:
    """Return whether at the first step that both runs have the ranks' inputs differ, and are the same taken together."""
    common = sorted(set(a.steps(ranks[0])) & set(b.steps(ranks[0]))) if len(ranks) > 1 else []
    if not common:
        return False
    first, second = ([_inputs(source, rank, common[0]) for rank in ranks] for source in (a, b))
    names = first[0].keys()
    if not names or any(one.keys() != names for one in (*first, *second)):
        return False
    if all(_same(x[name], y[name]) for x, y in zip(first, second, strict=True) for name in names):
        return False
    return all(_same(_sum([x[name] for x in first]), _sum([y[name] for y in second])) for name in names)


def _inputs(source: Source, rank: int, step: int) -> dict[str, Totals]:
    """Return the totals of what the model is given first, by name and how often it came before."""
    frame = StepFrame(source.table(rank, step))
    rows = np.flatnonzero(frame.texts["kind"].equals("module") & frame.texts["module"].equals("."))
    found: dict[str, Totals] = {}
    for row in rows.tolist():
        name = frame.text("name", row)
        if name.startswith("input ") and frame.text("phase", row) == "forward" and name not in found:
            count = float(frame.count[row])
            found[name] = count, float(frame.numbers["mean"][row]) * count, float(frame.numbers["l2"][row]) ** 2
    return found


def _sum(totals: Sequence[Totals]) -> Totals:
    counts, sums, squares = zip(*totals, strict=True)
    return math.fsum(counts), math.fsum(sums), math.fsum(squares)


def _same(a: Totals, b: Totals) -> bool:
    scale = math.sqrt(max(a[0], 1.0) * max(a[2], b[2]))  # what a sum may be at the most
    return a[0] == b[0] and abs(a[1] - b[1]) <= _SAME * scale and math.isclose(a[2], b[2], rel_tol=_SAME)
