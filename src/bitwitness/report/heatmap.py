"""The heat map: for each kind of number a byte for each module, span of steps and rank."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bitwitness.report.clean import name as shown_name
from bitwitness.report.unusual import unusual

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

KINDS = {
    "activation": "what modules return (forward)",
    "activation_grad": "gradients of what modules were given (backward)",
    "grad": "local gradients of parameters",
    "grad_reduced": "gradients as the optimizer reads them",
    "param": "parameters",
    "difference": "how far the results of the two runs are apart",
    "update": "size of the update over size of the weight",
}
MEASURES = {
    "change": "relative change",
    "z": "unusual for this row and time (z)",
    "l2": "L2 norm",
    "absmax": "largest magnitude",
}
BAD = 255
"""The byte of NaN or Inf; 0 is nothing recorded, 1 to 254 lie between the least and the largest of the layer."""
_MUST_BE_FINITE = ("activation", "param")
_CELLS = 6_000_000  # of all layers together: as many bytes before they are packed
_COLUMNS = 400
_LEAST_COLUMNS = 50
_MEASURES = 3  # of one kind
_ROWS = 600
_WHOLE = 64_000_000  # numbers of one matrix in memory


@dataclass(slots=True)
class Layer:
    """One kind by one measure: a matrix of bytes for each rank, rows by name and columns by span of steps."""

    kind: str
    measure: str
    least: float
    largest: float
    rows: list[str]
    ranks: list[Bytes]

    def to_dict(self) -> dict[str, Any]:
        """Return it for the page."""
        packed = [base64.b64encode(zlib.compress(one.tobytes(), 6)).decode("ascii") for one in self.ranks]
        told = {"kind": self.kind, "measure": self.measure, "least": self.least, "largest": self.largest}
        return told | {"rows": self.rows, "ranks": packed}


@dataclass(slots=True)
class HeatMap:
    """All layers, and what their columns and matrices are of.

    ``worst``: for each row's name, how unusual it ever was: the largest ``|z|`` (infinity for NaN or Inf), its step and rank.
    ``broken``: step, rank and name of the first NaN or Inf in what modules return or in parameters; a gradient's may be a loss
    scale's, which drops the step.
    """

    ranks: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    left_out: int = 0
    worst: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    broken: tuple[int, int, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it for the page."""
        kinds, measures = ({layer.kind for layer in self.layers}, {layer.measure for layer in self.layers})
        return {
            "ranks": self.ranks,
            "spans": [list(span) for span in self.spans],
            "layers": [layer.to_dict() for layer in self.layers],
            "kinds": {kind: said for kind, said in KINDS.items() if kind in kinds},
            "measures": {measure: said for measure, said in MEASURES.items() if measure in measures},
            "left_out": self.left_out,
        }


@dataclass(slots=True)
class _Matrix:
    """One rank's numbers of one kind in full: natural logarithms, NaN where there is none."""

    names: list[str]
    numbers: dict[str, Floats]
    bad: npt.NDArray[np.bool_]


class HeatMapMaker:
    """Takes one rank's rows after another; `made` puts them together.

    Parameters
    ----------
    steps
        The steps of all ranks, ascending.
    ranks, rows, kinds
        How many ranks there will be, names (of the kind that has most) and kinds: what a column stands for depends on it.
    maps
        How many share the page.

    """

    def __init__(self, steps: npt.NDArray[np.int64], ranks: int, rows: int, kinds: int, maps: int = 1) -> None:
        most = _WHOLE // max(min(rows, _ROWS), 1)
        self._steps = steps if len(steps) <= most else steps[:: -(-len(steps) // most)]
        cells = max(min(rows, _ROWS), 1) * max(ranks, 1) * max(kinds, 1) * _MEASURES * maps
        columns = min(_COLUMNS, max(_LEAST_COLUMNS, _CELLS // cells))
        self._width = -(-len(self._steps) // columns)  # steps that a column stands for
        self._found: dict[str, dict[int, _Matrix]] = {}
        self._worst: dict[str, tuple[float, int, int]] = {}
        self._broken: list[tuple[int, int, str]] = []

    def add(self, rank: int, table: pa.Table) -> None:
        """Take one rank's rows."""
        kinds = table.column("kind").combine_chunks()
        for kind in KINDS:
            rows = table.filter(pc.fill_null(pc.equal(kinds.cast(pa.string()), kind), fill_value=False))
            if rows.num_rows:
                matrix = _matrix(rows, self._steps)
                self._note_worst(matrix, rank)
                if kind in _MUST_BE_FINITE:
                    self._note_broken(matrix, rank)
                self._found.setdefault(kind, {})[rank] = self._folded(matrix)

    def add_changes(self, rank: int, names: list[str], changes: npt.NDArray[np.float64]) -> None:
        """Take one rank's relative changes, rows by name and columns by step; NaN where nothing was compared."""
        with np.errstate(divide="ignore"):
            logs = np.log(np.clip(changes, 1e-17, None)).astype(np.float32)
        matrix = _Matrix(names, {"change": np.where(np.isinf(changes), np.nan, logs)}, np.isinf(changes))
        self._found.setdefault("difference", {})[rank] = self._folded(matrix)

    def made(self) -> HeatMap:
        """Return the map."""
        ranks = sorted({rank for found in self._found.values() for rank in found})
        made = HeatMap(ranks, self._spans(), worst=self._worst, broken=min(self._broken, default=None))
        for kind, found in self._found.items():
            names = list(dict.fromkeys(one for matrix in found.values() for one in matrix.names))
            kept = sorted(names, key=lambda one: -self._worst.get(one, (0.0, 0, 0))[0])[:_ROWS]
            made.left_out = max(made.left_out, len(names) - len(kept))
            chosen = set(kept)
            names = [one for one in names if one in chosen]
            measures = [one for one in MEASURES if any(one in matrix.numbers for matrix in found.values())]
            made.layers += [_layer(kind, measure, names, found, ranks, len(made.spans)) for measure in measures]
        return made

    def _note_worst(self, matrix: _Matrix, rank: int) -> None:
        unusual = np.where(matrix.bad, np.inf, np.nan_to_num(np.abs(matrix.numbers["z"]), nan=0.0, posinf=0.0))
        at = unusual.argmax(axis=1)
        for row, name in enumerate(matrix.names):
            z = float(unusual[row, at[row]])
            if z > self._worst.get(name, (-1.0, 0, 0))[0]:
                self._worst[name] = z, int(self._steps[at[row]]), rank

    def _note_broken(self, matrix: _Matrix, rank: int) -> None:
        rows = np.flatnonzero(matrix.bad.any(axis=1)).tolist()
        self._broken += [
            (int(self._steps[matrix.bad[row].argmax()]), rank, shown_name(matrix.names[row])) for row in rows
        ]

    def _spans(self) -> list[tuple[int, int]]:
        starts = range(0, len(self._steps), self._width)
        return [(int(self._steps[i]), int(self._steps[min(i + self._width, len(self._steps)) - 1])) for i in starts]

    def _folded(self, matrix: _Matrix) -> _Matrix:
        """Return a matrix with a column for each span: of each the number farthest from usual, or the largest."""
        starts = np.arange(0, len(self._steps), self._width)
        numbers = {}
        for measure, values in matrix.numbers.items():
            if measure == "z":
                high, low = (np.asarray(fold.reduceat(values, starts, axis=1)) for fold in (np.fmax, np.fmin))
                numbers[measure] = np.where(np.nan_to_num(np.abs(low)) > np.nan_to_num(np.abs(high)), low, high)
            else:
                numbers[measure] = np.asarray(np.fmax.reduceat(values, starts, axis=1))
        return _Matrix(matrix.names, numbers, np.logical_or.reduceat(matrix.bad, starts, axis=1))


def _matrix(rows: pa.Table, steps: npt.NDArray[np.int64]) -> _Matrix:
    """Return rows as matrices; of a name that a step has several of (slots, micro-batches) the largest counts."""
    encoded = pc.dictionary_encode(pc.fill_null(rows.column("name").cast(pa.string()), "?")).combine_chunks()
    encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
    names = encoded.dictionary.to_pylist()
    row = np.asarray(encoded.indices, dtype=np.int64)
    column = np.searchsorted(steps, _column(rows, "step").astype(np.int64)).clip(0, max(len(steps) - 1, 0))
    place = row * len(steps) + column
    shape = len(names), len(steps)
    value = _column(rows, "value")
    told = np.isfinite(value)
    size = np.where(told, np.abs(value), _column(rows, "l2"))
    least, largest = _column(rows, "min"), _column(rows, "max")
    counted = (np.nan_to_num(_column(rows, "nan")) + np.nan_to_num(_column(rows, "inf"))) > 0
    absent = np.isnan(size) & np.isnan(largest)
    bad = counted | np.isinf(size) | (absent & ~counted & (np.nan_to_num(_column(rows, "count"), nan=1.0) > 0))
    numbers = {"l2": _filled(shape, place, np.where(bad, np.nan, size))}
    if not told.all():
        numbers["absmax"] = _filled(shape, place, np.where(bad, np.nan, np.fmax(np.abs(least), np.abs(largest))))
    broken = np.zeros(shape[0] * shape[1], dtype=bool)
    broken[place[bad]] = True
    numbers["z"] = unusual(numbers["l2"])
    return _Matrix(names, numbers, broken.reshape(shape))


def _filled(shape: tuple[int, int], place: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> Floats:
    """Return natural logarithms by place, the largest where there are several; zero has that of the least float64."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.maximum(np.log(values), -745.0).astype(np.float32)
    found = np.full(shape[0] * shape[1], np.nan, dtype=np.float32)
    np.fmax.at(found, place, logs)
    return found.reshape(shape)


def _layer(
    kind: str, measure: str, names: list[str], found: dict[int, _Matrix], ranks: list[int], columns: int
) -> Layer:
    """Return one kind by one measure as bytes."""
    tables = [found[rank].numbers[measure] for rank in found if measure in found[rank].numbers]
    kept = [values[(values > -700.0) & np.isfinite(values)] for values in tables]
    least = min((float(one.min()) for one in kept if one.size), default=0.0)
    largest = max((float(one.max()) for one in kept if one.size), default=1.0)
    if measure == "z":
        largest = min(max(abs(least), abs(largest), 1.0), 1000.0)
        least = -largest
    largest = max(largest, least + 1e-6)
    matrices = [_bytes(names, found.get(rank), measure, columns, (least, largest)) for rank in ranks]
    return Layer(kind, measure, least, largest, [shown_name(one) for one in names], matrices)


def _bytes(names: list[str], matrix: _Matrix | None, measure: str, columns: int, limits: tuple[float, float]) -> Bytes:
    made = np.zeros((len(names), columns), dtype=np.uint8)
    if matrix is None or measure not in matrix.numbers:
        return made
    place = {name: row for row, name in enumerate(matrix.names)}
    rows = [(to, place[name]) for to, name in enumerate(names) if name in place]
    to, own = (list(side) for side in zip(*rows, strict=True)) if rows else ([], [])
    values, bad = matrix.numbers[measure][own], matrix.bad[own]
    scaled = 1.0 + (values.clip(*limits) - limits[0]) * (253.0 / (limits[1] - limits[0]))
    made[to] = np.where(bad, BAD, np.where(np.isnan(values), 0, np.nan_to_num(scaled))).astype(np.uint8)
    return made


def map_of_changes(changes: Mapping[int, Mapping[tuple[str, int], float]]) -> HeatMap:
    """Return the map of two recordings: of each rank, by module and step, how far results are apart."""
    places = [place for found in changes.values() for place in found]
    steps = np.unique([step for _, step in places]).astype(np.int64)
    if not len(steps):
        return HeatMap()
    names = list(dict.fromkeys(module for module, _ in places))
    maker = HeatMapMaker(steps, len(changes), len(names), 1)
    row = {name: number for number, name in enumerate(names)}
    column = {int(step): number for number, step in enumerate(steps)}
    for rank, found in changes.items():
        values = np.full((len(names), len(steps)), np.nan)
        for (module, step), change in found.items():
            values[row[module], column[step]] = change
        maker.add_changes(rank, names, values)
    return maker.made()


def _column(rows: pa.Table, name: str) -> npt.NDArray[np.float64]:
    column = rows.column(name).cast(pa.float64()).fill_null(float("nan")).combine_chunks()
    return np.asarray(column, dtype=np.float64).reshape(-1)
