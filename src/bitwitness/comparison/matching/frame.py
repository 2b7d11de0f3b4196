"""One step of one rank as columns: what alignment and comparison work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bitwitness.oracle.names import PRODUCTS, canonical
from bitwitness.oracle.recorded import arguments

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_TEXTS = ("kind", "phase", "module", "op", "slot", "dtype", "placement", "layout", "name", "args", "tensor")
_COUNTS = ("nan", "pos_inf", "neg_inf", "zeros")
_NUMBERS = ("min", "max", "mean", "l2", "sketch")
_OTHERWISE_ORDERED = ("cudnn_batch_norm_backward", "miopen_batch_norm_backward")
"""Operators that take the input before its result's gradient."""
MICROS = "micros"
"""Under which a table's metadata tell how many micro-batches were put together in it."""
RANKS = "ranks"
"""The same of ranks."""
COMPUTED = "computed"
"""The same of `StepFrame.computed`, whose operators are not there any more."""
UNKNOWN = -1
"""Stands for a count that was not taken."""


@dataclass(slots=True)
class Text:
    """A column of strings: codes into ``words``; -1 where there is none."""

    codes: Ints
    words: list[str]

    def __getitem__(self, row: int) -> str | None:
        code = self.codes[row]
        return None if code < 0 else self.words[code]

    def at(self, row: int) -> str:
        """Return a row's string; empty if there is none."""
        code = self.codes[row]
        return "" if code < 0 else self.words[code]

    def equals(self, word: str) -> npt.NDArray[np.bool_]:
        """Return which rows hold a word."""
        found: npt.NDArray[np.bool_] = self.codes == (self.words.index(word) if word in self.words else -2)
        return found


@dataclass(slots=True)
class Node:
    """One operator call, module call, parameter and so on: the rows that belong to it, in order."""

    number: int
    rows: list[int]
    kind: str
    phase: str
    module: str
    op: str
    call: int
    micro: int
    recomputed: bool
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    @property
    def parameter(self) -> str:
        """The parameter that a gradient's node, or a parameter's own, is of."""
        return parameter_of(self.module, self.op)

    @property
    def site(self) -> str:
        """The site of its first result."""
        return f"{self.module}/{self.op}#{self.call}:{self.phase}"


def parameter_of(module: str, op: str) -> str:
    """Return the name of the parameter that a row of a gradient, or its own, is of."""
    return op if module == "." else f"{module}.{op}"


class StepFrame:
    """A table of `bitwitness.store.rows.SCHEMA` as arrays.

    Parameters
    ----------
    table
        The rows of one step of one rank.
    factors
        By what each row's values are multiplied, where that is not as they were recorded.

    """

    def __init__(self, table: pa.Table, factors: Floats | None = None) -> None:
        self.factors = factors
        self.table = table
        told = (table.schema.metadata or {}).get(MICROS.encode())
        self.micros = int(told) if told else len(table.column("micro").unique())
        """How many micro-batches the step has, put together or not."""
        ranks = (table.schema.metadata or {}).get(RANKS.encode())
        self.ranks = int(ranks) if ranks else 1
        """How many ranks were put together."""
        self.size = table.num_rows
        self.texts = {name: _text(table.column(name)) for name in _TEXTS}
        self.counts = {name: _ints(table.column(name), UNKNOWN) for name in _COUNTS}
        self.numbers = {name: _floats(table.column(name)) for name in _NUMBERS}
        self.count = _ints(table.column("count"), 0)
        self.hash = _ints(table.column("hash"), 0)
        self.hashed = np.asarray(table.column("hash").is_valid().combine_chunks())
        self.node = _ints(table.column("node"), -1)
        self.value = _ints(table.column("value"), -1)
        self.producer = _ints(table.column("producer"), -1)
        self.call = _ints(table.column("call"), 0)
        self.micro = _ints(table.column("micro"), 0)
        self.stack = _ints(table.column("stack"), -1)
        self.recomputed = np.asarray(table.column("recomputed").fill_null(pa.scalar(value=False)).combine_chunks())
        self.stored = self.texts["dtype"]
        """The dtypes that values are kept in."""
        self.texts["dtype"] = self._precisions()
        self.texts["slot"] = self._slots()
        self._shapes: list[tuple[int, ...]] | None = None
        self._nodes: list[Node] | None = None

    def _precisions(self) -> Text:
        """Return the dtypes that results are computed in: ``tf32`` where a float32 product's factors were rounded to that.

        So are then what the modules return that the operator is in.
        """
        dtypes, args = self.stored, self.texts["args"]
        told = {code: str(arguments(word).get("p", "")) for code, word in enumerate(args.words) if '"p":"' in word}
        if not told:
            return dtypes
        codes, words = dtypes.codes.copy(), list(dtypes.words)
        results = np.array([word.startswith(("out", "grad_in")) for word in self.texts["slot"].words] or [False])
        result = results[self.texts["slot"].codes]
        modules, kinds = self.texts["module"], self.texts["kind"]
        for precision in set(told.values()):
            marked = np.isin(args.codes, [code for code, found in told.items() if found == precision])
            paths = {modules.words[code] for code in set(modules.codes[marked].tolist()) if code >= 0}
            around = [code for code, path in enumerate(modules.words) if any(_holds(path, own) for own in paths)]
            rows = np.isin(self.node, self.node[marked])
            rows |= kinds.equals("module") & np.isin(modules.codes, around)
            words.append(precision)
            codes[rows & result & dtypes.equals("float32")] = len(words) - 1
        return Text(codes, words)

    def _slots(self) -> Text:
        """Return slots as torch's own operator has them, where an accelerator's takes what it reads in another order."""
        slots, ops = self.texts["slot"], self.texts["op"]
        rows = np.isin(ops.codes, [code for code, word in enumerate(ops.words) if word in _OTHERWISE_ORDERED])
        if not rows.any():
            return slots
        codes = slots.codes.copy()
        first, second = rows & slots.equals("in0"), rows & slots.equals("in1")
        if first.any() and second.any():
            codes[first], codes[second] = slots.words.index("in1"), slots.words.index("in0")
        return Text(codes, slots.words)

    @property
    def is_part(self) -> bool:
        """Whether operators were left out of it, in which what it shows was computed."""
        return COMPUTED.encode() in (self.table.schema.metadata or {})

    @cached_property
    def computed(self) -> str:
        """The dtype in which most of the recorded operators that sum products have their results; empty without any.

        Where modules alone were recorded: of modules that have a weight.
        """
        if self.is_part:
            return str(self.table.schema.metadata[COMPUTED.encode()].decode())
        ops, slots, dtypes = (self.texts[name] for name in ("op", "slot", "dtype"))
        products = [code for code, word in enumerate(ops.words) if canonical(word) in PRODUCTS]
        results = [code for code, word in enumerate(slots.words) if word.startswith("out")]
        kinds = self.texts["kind"]
        rows = kinds.equals("op") & np.isin(ops.codes, products)
        if not kinds.equals("op").any():
            weighted = self.node[kinds.equals("module") & slots.equals("weight")]
            rows = kinds.equals("module") & np.isin(self.node, weighted)
        found = dtypes.codes[rows & np.isin(slots.codes, results) & (dtypes.codes >= 0)]
        return dtypes.words[int(np.bincount(found).argmax())] if found.size else ""

    def text(self, name: str, row: int) -> str:
        """Return a row's string in a column; empty if there is none."""
        return self.texts[name].at(row)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Each row's shape."""
        if self._shapes is None:
            self._shapes = [tuple(shape or ()) for shape in self.table.column("shape").to_pylist()]
        return self._shapes

    @property
    def nodes(self) -> list[Node]:
        """The nodes in the order in which they were complete."""
        if self._nodes is None:
            self._nodes = _nodes(self)
        return self._nodes

    @cached_property
    def trained(self) -> set[str]:
        """The names of the parameters that have a gradient in this step."""
        rows = np.flatnonzero(self.texts["kind"].equals("gradient")).tolist()
        places = {(self.text("module", row), self.text("op", row)) for row in rows}
        return {parameter_of(module, op) for module, op in places}

    def sizes(self, node: Node) -> list[int]:
        """Return how many elements each result of a node has."""
        return [int(self.count[row]) for row in node.outputs]

    def sizes_of_modules(self, modules: Mapping[str, str]) -> dict[tuple[str, str, int], list[list[int]]]:
        """Return the `sizes` of each module's calls, by phase, path and micro-batch; ``modules``: other names for paths."""
        found: dict[tuple[str, str, int], list[list[int]]] = {}
        for node in self.nodes:
            if node.kind == "module":
                place = node.phase, modules.get(node.module, node.module), node.micro
                found.setdefault(place, []).append(self.sizes(node))
        return found

    def stats(self, row: int) -> dict[str, Any]:
        """Return a row's statistics, None where they are not known."""
        found: dict[str, Any] = {"count": int(self.count[row])}
        found |= {name: None if self.counts[name][row] < 0 else int(self.counts[name][row]) for name in _COUNTS}
        for name in _NUMBERS:
            number = float(self.numbers[name][row])
            found[name] = None if np.isnan(number) else number
        found["hash"] = f"{int(self.hash[row]) & (1 << 64) - 1:016x}" if self.hashed[row] else None
        return found


def _holds(path: str, own: str) -> bool:
    """Tell whether a module is another one, or the other one is in it."""
    return path in (own, ".") or own.startswith(f"{path}.")


def _text(column: pa.ChunkedArray) -> Text:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = (
            array.chunk(0)
            if array.num_chunks
            else pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), pa.array([], pa.string()))
        )
    codes = np.asarray(array.indices.fill_null(-1), dtype=np.int64)
    return Text(codes, [word if word is not None else "" for word in array.dictionary.to_pylist()])


def _ints(column: pa.ChunkedArray, missing: int) -> Ints:
    return np.asarray(column.fill_null(missing).combine_chunks(), dtype=np.int64)


def _floats(column: pa.ChunkedArray) -> Floats:
    return np.asarray(column.fill_null(float("nan")).combine_chunks(), dtype=np.float64)


def _nodes(frame: StepFrame) -> list[Node]:
    """Group the rows; a node is as late as its last row."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(frame.node.tolist()):
        rows.setdefault(number, []).append(row)
    found = [_node(frame, number, members) for number, members in rows.items()]
    found.sort(key=lambda node: node.rows[-1])
    return found


def _node(frame: StepFrame, number: int, rows: list[int]) -> Node:
    first = rows[0]
    kind, phase = frame.text("kind", first), frame.text("phase", first)
    node = Node(
        number,
        rows,
        kind,
        phase,
        frame.text("module", first),
        frame.text("op", first),
        int(frame.call[first]),
        int(frame.micro[first]),
        bool(frame.recomputed[first]),
    )
    for row in rows:
        (node.outputs if _is_output(kind, phase, frame.text("slot", row)) else node.inputs).append(row)
    return node


def _is_output(kind: str, phase: str, slot: str) -> bool:
    if kind == "module" and phase == "backward":
        return slot.startswith("grad_in")
    if kind in ("op", "module", "optimizer", "collective"):
        return slot.startswith(("out", "running"))
    return True
