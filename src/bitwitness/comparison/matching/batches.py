"""Whether two steps were given the same batch, and what can be compared where it is laid out otherwise, or in another order.

Three calls or one, packed, padded or token by token: the operators work on other shapes then, but the weights' gradients and
updates are those of the same mathematics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bitwitness.comparison.differences import FINE, Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import COMPUTED, StepFrame
from bitwitness.comparison.measuring.allowance import roundoff
from bitwitness.comparison.measuring.changes import changes
from bitwitness.comparison.measuring.relation import is_reordered, numbers_of

_ALIKE = 1e-3
"""Relative change of gradients up to which they say that nothing else was given."""
_OF_WEIGHTS = ("parameter", "gradient", "optimizer")


def other_batch(a: StepFrame, b: StepFrame) -> str:
    """Say which of the model's inputs has another shape in each run; empty if none has."""
    first, second = _inputs(a), _inputs(b)
    for name in reversed(first):  # in the order in which they were given
        if name in second and set(first[name]) != set(second[name]):
            here, there = (" and ".join(map(str, map(list, found[name]))) for found in (first, second))
            return f"{name} has the shape {here} in run A and {there} in run B"
    return ""


def other_values(a: StepFrame, b: StepFrame) -> tuple[str, float]:
    """Say which of the model's inputs holds other values, or the same in another order, and by how much it differs at most."""
    first, second = _input_rows(a), _input_rows(b)
    if first.keys() != second.keys():
        return "", 0.0
    found, largest = [], 0.0
    for name, rows in first.items():
        if len(rows) != len(second[name]):
            return "", 0.0
        gaps = changes(a, b, np.array(rows), np.array(second[name]))
        pairs = [(i, j) for i, j, gap in zip(rows, second[name], gaps, strict=True) if gap]
        sizes = [[a.shapes[i] for i, _ in pairs], [b.shapes[j] for _, j in pairs]]
        if sizes[0] != sizes[1]:
            ordered = sorted(sizes[0]) == sorted(sizes[1])
            return (f"{name} is given in pieces in another order", math.inf) if ordered else ("", 0.0)
        if pairs:
            ordered = all(is_reordered(a, i, b, j) for i, j in pairs) or _are_dealt_otherwise(a, b, pairs)
            found.append(f"{name} holds {'the same values in another order' if ordered else 'other values'}")
            # What is left of an order in gradients is as much as a coarse dtype rounds.
            coarse = ordered and roundoff(a.computed or "") > FINE
            largest = max(largest, math.inf if coarse else float(gaps.max()))
    return " and ".join(reversed(found)), largest


def counts_in_parts(differences: Differences, pair: Pair, row: int) -> bool:
    """Return whether integers are read that may count from where each part of a batch begins: offsets, positions.

    Of parts that were put together, whose reader makes the same of them, as do all gradients.
    """
    a, change_of = differences.a, differences.change_of
    if not a.is_part or not a.text("name", row).startswith("input ") or roundoff(a.text("dtype", row)):
        return False
    if any(change_of[out] > differences.noise_limit() for out, _ in pair.outputs):
        return False
    gradients = (one for one in differences.alignment.pairs if one.a.kind == "gradient")
    told = (one for one in gradients if not differences.returns_another(one))
    return all(change_of[out] <= _ALIKE for one in told for out, _ in one.outputs)


def _are_dealt_otherwise(a: StepFrame, b: StepFrame, pairs: Sequence[tuple[int, int]]) -> bool:
    """Return whether parts of a batch hold the same numbers all together, though not each."""
    sides = [[numbers_of(a, i) for i, _ in pairs], [numbers_of(b, j) for _, j in pairs]]
    first, second = (
        (sum(x.count for x in parts), min(x.min for x in parts), max(x.max for x in parts)) for parts in sides
    )
    sums = [(math.fsum(x.mean * x.count for x in parts), math.fsum(x.l2**2 for x in parts)) for parts in sides]
    alike = all(math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-9) for x, y in zip(*sums, strict=True))
    return len(pairs) > 1 and first == second and alike


def ordered_otherwise(differences: Differences) -> tuple[str, float]:
    """Say the same of inputs whose statistics are equal, and whose order the values themselves alone tell: of joined parts."""
    first, second = _input_rows(differences.a), _input_rows(differences.b)
    found, largest = [], 0.0
    for name, rows in first.items():
        pairs = [(i, j) for i, j in zip(rows, second.get(name, []), strict=False) if differences.change_of.get(i, 0.0)]
        if pairs and all(_same_numbers(differences, i, j) for i, j in pairs):
            found.append(f"{name} holds the same values in another order")
            largest = max(largest, *(differences.change_of[i] for i, _ in pairs))
    return " and ".join(reversed(found)), largest


def _same_numbers(differences: Differences, row_a: int, row_b: int) -> bool:
    x, y = numbers_of(differences.a, row_a), numbers_of(differences.b, row_b)
    unknown = math.isnan(x.sketch) or math.isnan(y.sketch)
    return unknown and (x.count, x.min, x.max) == (y.count, y.min, y.max) and math.isclose(x.l2, y.l2, rel_tol=1e-6)


def of_weights(frame: StepFrame) -> StepFrame:
    """Return a step's parameters, complete gradients and updates alone; what each rank's part leaves is its own."""
    kinds, slots = (frame.table.column(name).cast(pa.string()) for name in ("kind", "slot"))
    local = pc.and_(pc.equal(kinds, "gradient"), pc.fill_null(pc.equal(slots, "local"), fill_value=False))
    table = frame.table.filter(pc.and_(pc.is_in(kinds, pa.array(_OF_WEIGHTS)), pc.invert(local)))
    told = {**(frame.table.schema.metadata or {}), COMPUTED: frame.computed}  # by operators that are left out
    return StepFrame(table.replace_schema_metadata(told))


def has_gradients(frame: StepFrame) -> bool:
    """Return whether a step has gradients: without, equal weights say nothing of what was computed."""
    return bool(frame.texts["kind"].equals("gradient").any())


def _inputs(frame: StepFrame) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of each of the model's inputs, over its calls."""
    found: dict[str, list[tuple[int, ...]]] = {}
    whole = _input_rows(frame)
    for name, rows in whole.items():
        shapes = found.setdefault(name, [])
        shapes += dict.fromkeys(frame.shapes[row] for row in rows)
    return found


def _input_rows(frame: StepFrame) -> dict[str, list[int]]:
    """Return the rows of each of the model's inputs, last first: of its calls, or where it was read first."""
    text = frame.texts["name"]
    codes = [code for code, word in enumerate(text.words) if word.startswith("input ")]
    named = np.isin(text.codes, codes)
    given = named & frame.texts["kind"].equals("module") & frame.texts["module"].equals(".")
    rows = np.flatnonzero(given if given.any() else named).tolist()
    whole = [
        row for row in rows if math.prod(frame.shapes[row]) == frame.count[row]
    ]  # others are damaged, told elsewhere
    found: dict[str, list[int]] = {frame.text("name", row): [] for row in reversed(whole)}
    for row in whole:
        rows = found[frame.text("name", row)]
        if given.any() or not rows:
            rows.append(row)
    return found


def leaves_out(more: StepFrame, fewer: StepFrame) -> bool:
    """Return whether a step with fewer micro-batches was given the first ones of the other's, and not all of them together."""
    first, second = _input_rows(more), _input_rows(fewer)
    if more.micros <= fewer.micros or not second or first.keys() != second.keys():
        return False
    held = [  # single numbers may count the samples of a whole step
        {name: [numbers_of(frame, row) for row in rows if frame.count[row] > 1] for name, rows in of.items()}
        for frame, of in ((more, first), (fewer, second))
    ]
    first_ones = all(held[0][name][: len(rows)] == rows for name, rows in held[1].items())
    return first_ones and any(len(rows) < len(held[0][name]) for name, rows in held[1].items())
