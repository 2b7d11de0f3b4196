"""The rows of one step of a dump of msprobe; what makes no sense in it is told and left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from bitwitness.store.msprobe_beside import parent_of
from bitwitness.store.msprobe_entry import (
    EntryName,
    Malformed,
    arguments_text,
    clean,
    in_site,
    measures_of,
    parse_name,
    read_value,
    short,
    tensors_in,
    unknown_parts,
    values_of,
    wrong_measures,
)
from bitwitness.store.rows import Measured, Row, to_table

_MOST_ROWS = 1 << 32  # of a step, so that steps' numbers do not meet
_MODULES = ("Module.", "Cell.")


class StepReader:
    """Turns the entries of one ``dump.json`` into rows.

    Parameters
    ----------
    step
        Its number: rows of different steps get numbers that do not meet.
    parents
        What ``construct.json`` holds: a name's parent, or a list of its parent and the micro-batch.
    stacks
        The number of each name's call stack.
    kept
        Whether the dump is to hold the tensors themselves, so that each names its file.

    """

    def __init__(self, step: int, parents: Mapping[str, Any], stacks: Mapping[str, int], *, kept: bool = False) -> None:
        self._step = step
        self._parents = parents
        self._stacks = stacks
        self._kept = kept
        self._measures: frozenset[str] | None = None
        self._calls: Counter[tuple[int, EntryName]] = Counter()
        self._rows: list[Row] = []
        self._values: dict[int, Measured] = {}
        self._base = step * _MOST_ROWS
        self._wrapped = False
        self.problems: list[str] = []
        """What was left out, one sentence each."""

    def table(self, rank: int, data: Mapping[str, Any]) -> pa.Table:
        """Return the rows of all entries."""
        paths = [name.partition(".")[2] for name in data if name.startswith(_MODULES)]
        self._wrapped = bool(paths) and all(path.startswith("module.") for path in paths)
        for node, (name, entry) in enumerate(data.items()):
            try:
                self._add(self._base + node, name, entry)
            except Malformed as error:
                self.problems.append(f"{short(name)}: {error}")
        return to_table(rank, self._rows, self._values)

    def _add(self, node: int, name: str, entry: Any) -> None:
        """Add the rows of one entry."""
        if not isinstance(entry, dict):
            raise Malformed(f"{short(entry)}; expected an object of arguments and results")
        parent, micro = self._parent(name)
        call = parse_name(self._unwrapped(name), self._unwrapped(parent))
        stack = self._stacks.get(name, -1)
        if call.kind != "gradient":
            args = arguments_text(call.op, entry) if call.phase != "backward" else None
            self.problems += [
                f"{short(name)}: {short(key)}, which is no part of a call" for key in unknown_parts(entry)
            ]
            self._add_values(self._row(node, micro, call, args=args, stack=stack), values_of(call, entry))
            return
        for leaf, found in entry.items():
            row = self._row(node, micro, call._replace(op=in_site(leaf)), args=None, stack=stack)
            full = leaf if call.module == "." else f"{call.module}.{leaf}"
            values = found if isinstance(found, list) else [found]  # one gradient a parameter, in a list of one
            self._add_values(row._replace(name=clean(full)), tensors_in(values[0] if values else None, "reduced"))

    def _unwrapped(self, name: str) -> str:
        """Return a name without the wrapper (DDP) that holds the whole model: a recording of ours names from within."""
        return name.replace(".module.", ".", 1) if self._wrapped and name.startswith(_MODULES) else name

    def _parent(self, name: str) -> tuple[str, int]:
        """Return the name of the module in which an entry ran, and the micro-batch."""
        return parent_of(self._parents.get(name)) or ("", 0)  # what makes no sense is told by who reads that file

    def _row(self, node: int, micro: int, call: EntryName, *, args: str | None, stack: int) -> Row:
        """Return what an entry's rows have in common; counts the call."""
        number = self._calls[micro, call]
        self._calls[micro, call] += 1
        return Row(
            self._step, micro, 0, node, call.kind, call.phase, call.module, call.op, number, "", "", (), None, None, 0, -1,
            None, args, stack, None, recomputed=False,
        )  # fmt: skip

    def _check(self, what: str, described: Mapping[str, Any]) -> None:
        """Tell of a tensor of which something that all others have is not said, or not in a form that can be read."""
        measures = measures_of(described)
        if self._measures is None:
            self._measures = measures
        lacking = sorted(self._measures ^ measures) if 0 not in described["shape"] else []
        lacking += wrong_measures(described)
        if self._kept and not isinstance(described.get("data_name"), str):
            lacking.append("data_name")
        if lacking:
            self.problems.append(f"{what}: {', '.join(lacking)} of it, which cannot be read or others of the dump lack")

    def _add_values(self, row: Row, found: Iterator[tuple[str, Mapping[str, Any]]]) -> None:
        """Add a row for each tensor; one that makes no sense is told, and the others are read."""
        args = row.args
        for slot, described in found:
            try:
                value = read_value(slot.replace("@", "_"), described)
            except Malformed as error:
                self.problems.append(f"{row.module}/{row.op} {slot[:80]}: {error}")
                continue
            self._check(f"{row.module}/{row.op} {slot[:80]}", described)
            number = self._base + len(self._rows)
            kept = None if value.file is None else f"{self._step}|{value.file}"
            self._values[number] = value.measured
            self._rows.append(
                row._replace(
                    seq=number,
                    slot=value.slot,
                    dtype=value.dtype,
                    shape=value.shape,
                    value=number,
                    args=args,
                    tensor=kept,
                )
            )
            args = None  # once a node
