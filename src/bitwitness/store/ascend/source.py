"""A folder of Ascend dump files as a recording: a file is an operator's call, its tensors are rows, measured by torch.

Rows carry the bit hash that recordings of ours do, so that the two can be compared; `stats` computes it, with torch. The files
themselves (`dump`, `opdebug`, `convert`) are read without.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.shown import quoted
from bitwitness.stats import exact_sketch, stats_of
from bitwitness.store.ascend.convert import dump_files
from bitwitness.store.ascend.dump import DumpFile, DumpTensor, read_dump
from bitwitness.store.ascend.names import DumpName, parse_name, place_of, read_mapping
from bitwitness.store.ascend.opdebug import is_opdebug_name
from bitwitness.store.rows import SCHEMA, Measured, Row, to_table

_LOOKED_AT = 1000  # files, until a folder is held for something else
_LARGEST_INT32 = (1 << 31) - 1  # what a column of rows holds
_MOST_ROWS = 1 << 32  # of a step, so that steps' numbers do not meet
_NOT_IN_A_SITE = re.compile(r"[/#:@]")
_REFERENCE = re.compile(r"(.+)\|(input|output)\.(\d{1,9})", re.ASCII | re.DOTALL)


class _NamedDump(NamedTuple):
    path: Path
    name: DumpName


def is_ascend(path: Path) -> bool:
    """Tell whether a folder holds Ascend dump files, by their names."""
    mappings = _mappings(lambda _: None)
    return path.is_dir() and any(
        _named(file, mappings) is not None for file in islice(dump_files(path, lambda _: None), _LOOKED_AT)
    )


def _mappings(failed: Callable[[str], None]) -> Callable[[Path], dict[str, str]]:
    """Return what reads a folder's ``mapping.csv``, once; ``failed`` is told of one that cannot be read."""
    return cache(lambda folder: read_mapping(folder, failed))


def _named(path: Path, mappings: Callable[[Path], dict[str, str]]) -> DumpName | None:
    """Return what a dump file's name tells, its long form where it was shortened; None if it is no dump of an operator."""
    if is_opdebug_name(path.name):
        return None
    found = parse_name(path.name)
    if found is None and _is_shortened(path.name):
        found = parse_name(mappings(path.parent).get(path.name, ""))
    return found


def _is_shortened(name: str) -> bool:
    """Tell whether a name is of the kind that stands for one that was too long."""
    return name.isascii() and name.isdigit()


class AscendSource:
    """A folder of Ascend dump files; see `bitwitness.store.source.Source`.

    Ranks and steps are the devices and iterations that the folders are named by, 0 where they are not.

    Parameters
    ----------
    path
        The folder.

    Raises
    ------
    UsageError
        If no file in it is named as a dump file is.

    """

    kind = "ascend"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.info: dict[str, Any] = {}
        self.problems: list[str] = []
        self._folder = Path(path)
        self._files: dict[int, dict[int, list[_NamedDump]]] = {}
        self._known: dict[int, dict[str, Path]] = {}
        mappings = _mappings(self.problems.append)
        for file in dump_files(self._folder, self.problems.append):
            name = _named(file, mappings)
            if name is None:
                if _is_shortened(file.name):
                    self.problems.append(f"{file} was left out: no mapping.csv beside it tells its whole name")
            else:
                rank, step = _place(file.parent)
                self._files.setdefault(rank, {}).setdefault(step, []).append(_NamedDump(file, name))
                self._known.setdefault(rank, {})[self._relative(file)] = file
        if not self._files:
            raise UnreadError(
                f"{self.path} holds no Ascend dump files; expected names such as Conv2D.conv1.3.1600000000000000: "
                "operator's type, its name, task and time"
            )

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._folder)).encode("utf-8", "backslashreplace").decode()

    def ranks(self) -> list[int]:
        """Return the devices that dumped anything."""
        return sorted(self._files)

    def steps(self, rank: int) -> list[int]:
        """Return a device's dumped iterations in ascending order."""
        return sorted(self._files.get(rank, {}))

    def stacks(self, rank: int) -> dict[int, str]:  # noqa: ARG002 - the same for all
        """Return no stacks: dump files hold none."""
        return {}

    def table(self, rank: int, step: int) -> pa.Table:
        """Return the rows of one step, by the times in the files' names; the values are read for it."""
        rows: list[Row] = []
        values: dict[int, Measured] = {}
        calls: Counter[tuple[str, str]] = Counter()
        files = sorted(
            self._files.get(rank, {}).get(step, []), key=lambda f: (f.name.timestamp, f.name.task_id, f.path)
        )
        base = step * _MOST_ROWS
        for node, file in enumerate(files):
            try:
                dump = read_dump(file.path)
            except UsageError as error:
                self._tell(f"{file.path} was left out: {error}")
                continue
            module, op = _site(file.name, dump)
            row = Row(
                step, 0, 0, base + node, "op", "forward", module, op, calls[module, op], "", "", (), None, None, 0, -1,
                None, None, -1, None, recomputed=False,
            )  # fmt: skip
            calls[module, op] += 1
            for tensor in (t for t in (*dump.inputs, *dump.outputs) if t.offset is not None):
                number = base + len(rows)
                try:
                    dtype, shape, values[number] = _measured(tensor)
                except UsageError as error:
                    self._tell(f"{file.path}: {tensor.kind} {tensor.index} was left out: {error}")
                    continue
                slot = f"{'in' if tensor.kind == 'input' else 'out'}{tensor.index}"
                kept = f"{self._relative(file.path)}|{tensor.kind}.{tensor.index}"
                rows.append(row._replace(seq=number, value=number, slot=slot, dtype=dtype, shape=shape, tensor=kept))
        return to_table(rank, rows, values) if rows else SCHEMA.empty_table()

    def tensor(self, rank: int, reference: str, dtype: str, shape: tuple[int, ...], layout: str | None) -> torch.Tensor:  # noqa: ARG002 - payloads lie in their own order
        """Return a kept value; see `bitwitness.store.source.Source`."""
        found = _REFERENCE.fullmatch(reference)
        path = self._known.get(rank, {}).get(found[1]) if found else None
        if found is None or path is None:
            raise UnreadError(f"{self.path}: {quoted(reference)} names no dump file of this folder; the row is damaged")
        dump = read_dump(path)
        tensors = dump.inputs if found[2] == "input" else dump.outputs
        if int(found[3]) >= len(tensors) or tensors[int(found[3])].offset is None:
            raise UnreadError(f"{path} holds no {found[2]} {found[3]}; the row is damaged")
        value, name = _read(tensors[int(found[3])])
        if name != dtype or tuple(value.shape) != tuple(shape):
            raise UnreadError(f"{path}: the row says {dtype} {list(shape)}, the file {name} {list(value.shape)}")
        return value

    def _tell(self, problem: str) -> None:
        """Note a problem once: tables may be read again."""
        if problem not in self.problems:
            self.problems.append(problem)


def _place(folder: Path) -> tuple[int, int]:
    """Return the rank and the step that a folder's path tells; 0 for what it does not tell."""
    place = place_of(folder.absolute())
    device = int(place.device) if place.device.isascii() and place.device.isdigit() else 0
    return _int32(device), _int32(place.iteration)


def _int32(number: int) -> int:
    return number if 0 <= number <= _LARGEST_INT32 else 0


def _site(name: DumpName, dump: DumpFile) -> tuple[str, str]:
    """Return the module and the operator of a dump: what the node's name says, where that is a path."""
    node = dump.op_name if "/" in dump.op_name else name.op_name
    module = node.rpartition("/")[0].strip("/").replace("/", ".")
    return _NOT_IN_A_SITE.sub("_", module) or ".", _NOT_IN_A_SITE.sub("_", _utf8(name.op_type)) or "op"


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _measured(tensor: DumpTensor) -> tuple[str, tuple[int, ...], Measured]:
    """Return a tensor's dtype, shape and statistics."""
    value, name = _read(tensor)
    if name != str(value.dtype).removeprefix("torch."):
        return name, tuple(value.shape), Measured(value.numel())  # raw bytes of a type that torch lacks
    try:
        stats = stats_of(value, with_hash=True)
    except UsageError:
        return name, tuple(value.shape), Measured(value.numel())
    numbers = (stats.min, stats.max, stats.mean, stats.l2)
    low, high, mean, norm = (float(number) if math.isfinite(number) else None for number in numbers)
    counts = (stats.count, stats.nan, stats.pos_inf, stats.neg_inf, stats.zeros)
    return name, tuple(value.shape), Measured(*counts, low, high, mean, norm, exact_sketch(value), stats.hash)


def _read(tensor: DumpTensor) -> tuple[torch.Tensor, str]:
    """Return a payload as a tensor and the name of its type: torch's, or the dump's where torch has none."""
    import numpy as np

    array = tensor.array()
    kind = getattr(torch, str(array.dtype), None)
    if array.dtype.type.__module__ != "numpy":  # ml_dtypes, of which NumPy knows no more than the size
        if not isinstance(kind, torch.dtype) or kind.itemsize != array.dtype.itemsize:
            array, kind = array.astype(np.int8 if "int" in str(array.dtype) else np.float32), None
        else:
            array = array.view(f"u{array.dtype.itemsize}")
    value = torch.from_numpy(array.copy())  # what is read from a file cannot be written to
    if isinstance(kind, torch.dtype) and value.dtype != kind:
        value = value.view(kind)
    return value, str(value.dtype).removeprefix("torch.") if _same(tensor.dtype, value.dtype) else tensor.dtype


def _same(name: str, dtype: torch.dtype) -> bool:
    """Tell whether values are the numbers that the dump's type names, or were widened to them; not raw bytes."""
    return dtype != torch.uint8 or name in ("uint8", "quint8", "uint1", "uint2", "dual_sub_uint8")
