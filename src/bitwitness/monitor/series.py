"""Series: the numbers of one thing over the steps; here, one step of all of them side by side, and their rows on disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bitwitness.monitor.sheet import Key, Numbers, StepRows
from bitwitness.site import Site
from bitwitness.store.monitored import SCHEMA


class SeriesKey(NamedTuple):
    """What a series is of: a row's key without the micro-batch, over which it is put together."""

    kind: str
    name: str
    slot: str | None = None
    metric: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.kind, self.name, self.slot, self.metric)))

    @property
    def site(self) -> Site:
        """Where it is, as findings say it."""
        if self.kind in ("grad", "grad_reduced", "param", "moment1", "moment2", "update"):
            phase = {"grad": "grad", "grad_reduced": "grad", "param": "param"}.get(self.kind, "optim")
            site = Site.of_parameter(self.name, phase)
            slot = {"grad": "local", "grad_reduced": "reduced", "param": "value"}.get(self.kind, self.kind)
            return Site(site.module, site.op, 0, phase, slot)
        if self.kind in ("activation", "activation_grad", "module"):
            phase = "backward" if self.kind == "activation_grad" else "forward"
            return Site(self.name, "module", 0, phase, self.slot or self.metric or "out0")
        if self.kind == "comm":
            name, _, call = self.name.partition("#")
            return Site(".", name, int(call or 0), "comm", self.slot or "out0")
        return Site(".", self.metric or "loss", 0, "forward", "value")


@dataclass(frozen=True)
class StepNumbers:
    """One step of all series that are known by then, each column [S]; NaN where a series has nothing now.

    Attributes
    ----------
    keys
        What they are of; a series keeps its place.
    order
        The places of those that are there, in the order in which the step made them.
    scaled
        Whether a gradient scaler is at work, under which an overflow is ordinary.
    batch
        Hashes of what the model was called with.

    """

    step: int
    rank: int
    keys: list[SeriesKey]
    order: NDArray[np.int64]
    count: Numbers
    nan: Numbers
    inf: Numbers
    low: Numbers
    high: Numbers
    mean: Numbers
    l2: Numbers
    value: Numbers
    scaled: bool = False
    batch: tuple[str, ...] = ()

    def places(self, kind: str, metric: str | None = None) -> list[int]:
        """Return the places of a kind's series."""
        return [i for i, key in enumerate(self.keys) if key.kind == kind and (metric is None or key.metric == metric)]

    def number(self, kind: str, metric: str) -> float:
        """Return one number of the step as a whole; NaN where there is none."""
        found = [self.value[i] for i in self.places(kind, metric)]
        return float(found[0]) if found else float("nan")


@dataclass
class _Layout:
    """What is the same for all steps with the same rows: where each goes, and the columns of text."""

    keys: list[Key]
    where: NDArray[np.int64]
    distinct: bool
    texts: dict[str, pa.Array] = field(default_factory=dict)


class Universe:
    """Knows all series of a rank, and lines each step's rows up with them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.keys: list[SeriesKey] = []
        self._places: dict[SeriesKey, int] = {}
        self._layouts: list[_Layout] = []

    def layout(self, keys: list[Key]) -> _Layout:
        """Return the layout of a step's rows; steps mostly have one that was there before."""
        for number, known in enumerate(self._layouts):
            if known.keys == keys:
                if number:  # the usual one is asked first
                    self._layouts.insert(0, self._layouts.pop(number))
                return known
        where = np.empty(len(keys), dtype=np.int64)
        for row, key in enumerate(keys):
            series = SeriesKey(*key[:4])
            if series not in self._places:
                self._places[series] = len(self.keys)
                self.keys.append(series)
            where[row] = self._places[series]
        layout = _Layout(keys, where, len(set(where.tolist())) == len(where))
        layout.texts = {
            name: _encoded([getattr(key, name) for key in keys]) for name in ("kind", "name", "slot", "metric")
        }
        layout.texts["micro"] = pa.array([key.micro for key in keys], pa.int32())
        self._layouts.insert(0, layout)
        del self._layouts[8:]
        return layout

    def numbers(self, rows: StepRows) -> StepNumbers:
        """Return a step of all series; micro-batches are put together."""
        layout = self.layout(rows.keys)
        size, where = len(self.keys), layout.where
        finite = rows.counts - np.nan_to_num(rows.figures[:, 0]) - np.nan_to_num(rows.figures[:, 1])
        with np.errstate(divide="ignore", invalid="ignore"):
            means = rows.figures[:, 5] / finite
        columns = {
            "count": (rows.counts, np.add),
            "nan": (rows.figures[:, 0], np.add),
            "inf": (rows.figures[:, 1], np.add),
            "low": (rows.figures[:, 3], np.minimum),
            "high": (rows.figures[:, 4], np.maximum),
            "mean": (means, None),
            "l2": (rows.figures[:, 6], np.hypot),
            "value": (rows.values, None),
        }
        spread = {name: _spread(column, where, size, how, layout.distinct) for name, (column, how) in columns.items()}
        _, first = np.unique(where, return_index=True)
        order = where[np.sort(first)]
        return StepNumbers(rows.step, self.rank, list(self.keys), order, **spread, scaled=rows.scaled, batch=rows.batch)

    def table(self, rows: StepRows, digits: int = 0) -> pa.Table:
        """Return a step's rows as they go to the disk."""
        layout = self.layout(rows.keys)
        figures, statistics = rows.figures, np.isfinite(rows.figures[:, 0])
        finite = rows.counts - np.nan_to_num(figures[:, 0]) - np.nan_to_num(figures[:, 1])
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = figures[:, 5] / finite
        integers = {
            "count": (rows.counts, ~statistics),
            "nan": (figures[:, 0], ~statistics),
            "inf": (figures[:, 1], ~statistics),
            "zeros": (figures[:, 2], ~(figures[:, 2] >= 0)),
        }
        reals = {"min": figures[:, 3], "max": figures[:, 4], "mean": mean, "l2": figures[:, 6]}
        arrays: dict[str, pa.Array] = dict(layout.texts)
        arrays["step"] = pa.array(np.full(len(rows.keys), rows.step, dtype=np.int32))
        for name, (column, missing) in integers.items():
            arrays[name] = pa.array(np.where(missing, 0, column).astype(np.int64), mask=missing)
        for name, column in reals.items():
            arrays[name] = pa.array(_rounded(column, digits), pa.float64(), mask=np.isnan(column))
        # a loss of NaN is a number here: only rows of statistics have none
        arrays["value"] = pa.array(_rounded(rows.values, digits), pa.float64(), mask=statistics)
        return pa.Table.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)


def _spread(column: Numbers, where: NDArray[np.int64], size: int, how: np.ufunc | None, distinct: bool) -> Numbers:
    result = np.full(size, np.nan)
    if distinct:
        result[where] = column
    elif how is None:
        total, seen = np.zeros(size), np.zeros(size)
        np.add.at(total, where, column)
        np.add.at(seen, where, 1.0)
        with np.errstate(invalid="ignore"):
            result = total / np.where(seen > 0, seen, np.nan)
    else:
        for row, place in enumerate(where.tolist()):
            result[place] = column[row] if np.isnan(result[place]) else how(result[place], column[row])
    return result


def _rounded(column: Numbers, digits: int) -> Numbers:
    """Return numbers with so many digits after the point of their decimal exponent's mantissa; 0 for all."""
    if not digits:
        return column
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.power(10.0, digits - 1 - np.floor(np.log10(np.abs(column))))
        result: Numbers = np.where(np.isfinite(scale), np.round(column * scale) / scale, column)
    return result


def _encoded(data: list[str | None]) -> pa.Array:
    numbers: dict[str, int] = {}
    indices = [None if text is None else numbers.setdefault(text, len(numbers)) for text in data]
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(list(numbers), pa.string()))
