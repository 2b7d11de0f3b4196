"""The timeline: loss, gradient norms and other numbers of the whole step, thinned so that no spike is lost."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bitwitness.report.clean import name as shown_name

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MOST_BUCKETS = 1000  # of a line, two points each: more than a screen has columns, with some left to zoom into
_MOST_BAD = 500  # steps with NaN or Inf that are marked
_FIRST = ("loss", "grad_norm", "lr", "loss_scale")


@dataclass(slots=True)
class Line:
    """One number of one rank over the steps; ``bad``: steps at which it was NaN or Inf."""

    metric: str
    rank: int
    steps: Ints
    values: Floats
    bad: list[int] = field(default_factory=list)
    points: int = 0
    """How many there were before thinning."""

    def to_dict(self) -> dict[str, Any]:
        """Return it for the page: arrays as base64 of little-endian numbers."""
        return {
            "metric": self.metric,
            "rank": self.rank,
            "steps": packed(self.steps.astype("<i4")),
            "values": packed(self.values.astype("<f8")),
            "bad": self.bad,
            "points": self.points,
        }


def packed(array: npt.NDArray[Any]) -> str:
    """Return an array's bytes as text."""
    return base64.b64encode(array.tobytes()).decode("ascii")


def buckets(steps: Ints, values: Floats, most: int = MOST_BUCKETS) -> tuple[Ints, Floats]:
    """Thin a line to ``most`` buckets of neighbours, and keep the least and the largest of each.

    What is NaN or infinite has no place on a line and is left out; `Line.bad` has it.
    """
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) <= 2 * most:
        return steps, values
    width = -(-len(values) // most)
    padded = np.full(-(-len(values) // width) * width, np.nan)
    padded[: len(values)] = values
    rows = padded.reshape(-1, width)  # each has at least one number: only the last is padded, and not wholly
    first = np.arange(len(rows)) * width
    kept = np.unique(np.concatenate([first + np.nanargmin(rows, axis=1), first + np.nanargmax(rows, axis=1)]))
    return steps[kept], values[kept]


def lines_of(rank: int, table: pa.Table, most: int = MOST_BUCKETS) -> list[Line]:
    """Return the lines of one rank: what was told of whole steps or, without that, the norm of all its gradients."""
    kinds = table.column("kind").cast(pa.string())
    training = table.filter(pc.fill_null(pc.equal(kinds, "training"), fill_value=False))
    metrics = np.array(training.column("metric").cast(pa.string()).fill_null("?").to_pylist(), dtype=object)
    named = np.array(training.column("name").cast(pa.string()).fill_null("").to_pylist(), dtype=object)
    steps, values = _ints(training.column("step")), _floats(training.column("value"))
    lines = []
    for metric, which in sorted(set(zip(metrics.tolist(), named.tolist(), strict=True)), key=_order):
        rows = (metrics == metric) & (named == which)
        label = metric if which in ("", ".") or metric in ("loss", "grad_norm") else f"{metric} {which}"
        lines.append(_line(shown_name(label), rank, steps[rows], values[rows], most))
    if not any(line.metric == "grad_norm" for line in lines):
        lines += _norm(rank, table, kinds, most)
    return lines


def _order(pair: tuple[str, str]) -> tuple[int, str, str]:
    metric, which = pair
    return (_FIRST.index(metric) if metric in _FIRST else len(_FIRST)), metric, which


def _norm(rank: int, table: pa.Table, kinds: pa.ChunkedArray, most: int) -> list[Line]:
    """Return the norm of all of a rank's gradients, from the norm of each."""
    rows = table.filter(pc.fill_null(pc.equal(kinds, "grad"), fill_value=False))
    if not rows.num_rows:
        return []
    steps, place = np.unique(_ints(rows.column("step")), return_inverse=True)
    sizes = _floats(rows.column("l2"))
    broken = (_ints(rows.column("nan")) + _ints(rows.column("inf"))) > 0
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.bincount(place, weights=np.where(broken, np.nan, sizes) ** 2, minlength=len(steps))
        return [_line("grad_norm", rank, steps, np.sqrt(squares), most)]


def _line(metric: str, rank: int, steps: Ints, values: Floats, most: int) -> Line:
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    bad = np.unique(steps[~np.isfinite(values)])[:_MOST_BAD]
    thinned = buckets(steps, values, most)
    return Line(metric, rank, *thinned, bad=bad.tolist(), points=len(values))


def _ints(column: pa.ChunkedArray) -> Ints:
    return np.asarray(column.cast(pa.int64()).fill_null(0).combine_chunks(), dtype=np.int64).reshape(-1)


def _floats(column: pa.ChunkedArray) -> Floats:
    return np.asarray(column.cast(pa.float64()).fill_null(float("nan")).combine_chunks(), dtype=np.float64).reshape(-1)
