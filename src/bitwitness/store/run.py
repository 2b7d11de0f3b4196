"""Reads a recording of ours, step by step: no more of it is in memory than a file or two. Only kept values need torch."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import open_file
from bitwitness.files.shown import shown
from bitwitness.store.reader import read_description
from bitwitness.store.rows import SCHEMA, STACKS
from bitwitness.store.seal import SealedFolder
from bitwitness.store.tensorfile import TensorReader

if TYPE_CHECKING:
    import torch

_RANK = re.compile(r"rank(\d{5,})")
_PART = re.compile(r"stats-(\d+)\.parquet")
_FILE = re.compile(r"[\w][\w.-]*\.safetensors")
_MOST_ROWS = 2_000_000  # of one file; ours hold some 50,000, or one step's: at 250 bytes a row half a gigabyte
_MOST_BYTES = 1 << 30  # of one file, unpacked: a few kilobytes can be told to become gigabytes
_OPEN_FILES = 8  # files of tensors that stay mapped: a comparison goes through a step in order, and a step has few


def is_recording(path: Path) -> bool:
    """Tell whether a folder is a recording of ours."""
    return any(path.glob("rank*/stats-*.parquet")) or any(path.glob("rank*/stats-*.parquet.part"))


class RunSource:
    """A run folder that holds a recording; see `bitwitness.store.source.Source`.

    Parameters
    ----------
    path
        The folder.

    Raises
    ------
    UsageError
        If it holds no rows.

    """

    kind = "bitwitness"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.problems: list[str] = []
        self._folder = Path(path)
        self.info: dict[str, Any] = {}
        try:
            self.info = read_description(self._folder)
        except UsageError as error:
            self.problems.append(str(error))
        self._seals: dict[Path, SealedFolder] = {}
        self._index: dict[int, dict[int, list[tuple[Path, int, int]]]] = {}
        for folder in sorted(self._folder.glob("rank*")):
            found = _RANK.fullmatch(folder.name)
            if found and folder.is_dir() and (steps := self._index_rank(folder)):
                self._index[int(found[1])] = steps
        if not self._index:
            raise UnreadError(
                f"{self.path} holds no recorded rows that can be read; expected rank*/stats-*.parquet, as bitwitness record "
                "writes them" + "".join(f"; {problem}" for problem in self.problems[:3])
            )
        self._loaded: tuple[Path, pa.Table] | None = None
        self._readers: dict[Path, TensorReader] = {}

    def _index_rank(self, folder: Path) -> dict[int, list[tuple[Path, int, int]]]:
        """Return where each step's rows are: files, first row, number of rows."""
        index: dict[int, list[tuple[Path, int, int]]] = {}
        seal = self._seals[folder] = SealedFolder(folder)
        self.problems += seal.problems
        for stacks in folder.glob("stacks-*.parquet"):
            if damage := seal.damage(stacks):
                self.problems.append(damage)
        parts = sorted((int(m[1]), p) for p in folder.iterdir() if (m := _PART.fullmatch(p.name)))
        for _, path in parts:
            if damage := seal.damage(path):
                self.problems.append(f"{damage}; it was left out")
                continue
            try:
                steps = self._steps_of(path)
            except (OSError, pa.ArrowException, UsageError) as error:
                self.problems.append(f"{path} was left out: {_first_line(error)}")
                continue
            runs = pc.run_end_encode(steps.combine_chunks() if steps.num_chunks != 1 else steps.chunk(0))
            first = 0
            for end, step in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
                index.setdefault(int(step), []).append((path, first, end - first))
                first = end
        return index

    def _steps_of(self, path: Path) -> pa.ChunkedArray:
        open_file(path, "a Parquet file").close()  # a FIFO would be waited for
        file = pq.ParquetFile(path)
        _check(file)
        steps = file.read(columns=["step"]).column("step")
        if steps.null_count:
            raise UnreadError("some of its rows have no step")
        if not len(steps):
            return pa.chunked_array([pa.array([], pa.int32())])
        return steps

    def check(self) -> None:
        """Look at every byte of the recording; what is damaged is added to `problems`."""
        for folder, seal in self._seals.items():
            found = list(seal.all_damage())
            # What is evidence is no part of the recording.
            for path in sorted(folder.glob("tensors/step*.safetensors")):
                damage = seal.damage(path)
                found += TensorReader(path).damage() if damage is None else [damage]
            self.problems += [problem for problem in found if problem not in self.problems]

    def ranks(self) -> list[int]:
        """Return the ranks that recorded anything."""
        return sorted(self._index)

    def steps(self, rank: int) -> list[int]:
        """Return a rank's recorded steps in ascending order."""
        return sorted(self._index.get(rank, {}))

    def table(self, rank: int, step: int) -> pa.Table:
        """Return the rows of one step."""
        pieces = []
        for path, first, count in self._index.get(rank, {}).get(step, []):
            if self._loaded is None or self._loaded[0] != path:
                try:
                    file = pq.ParquetFile(path)
                    _check(file)
                    table = file.read().select(SCHEMA.names).cast(SCHEMA)
                    table.validate(full=True)  # names that are no text, lists that end elsewhere
                    self._loaded = path, table
                except (OSError, pa.ArrowException, UsageError) as error:
                    self.problems.append(f"{path} was left out: {_first_line(error)}")
                    self._loaded = path, SCHEMA.empty_table()
            pieces.append(self._loaded[1].slice(first, count))
        table = pa.concat_tables(pieces) if pieces else SCHEMA.empty_table()
        return table.unify_dictionaries().combine_chunks()

    def stacks(self, rank: int) -> dict[int, str]:
        """Return the call stacks by number."""
        found: dict[int, str] = {}
        folder = self._folder / f"rank{rank:05d}"
        for path in sorted(folder.glob("stacks-*.parquet")):
            if folder in self._seals and self._seals[folder].damage(path):
                continue  # told when the folder was opened
            with suppress(OSError, ValueError, pa.ArrowException, UsageError):  # ValueError: a text that is none
                file = pq.ParquetFile(path)
                _check_size(file)
                table = file.read().select(STACKS.names).cast(STACKS)
                found |= dict(zip(table["stack"].to_pylist(), table["text"].to_pylist(), strict=True))
        return found

    def tensor(self, rank: int, reference: str, dtype: str, shape: tuple[int, ...], layout: str | None) -> torch.Tensor:
        """Return a kept value; see `bitwitness.store.source.Source`."""
        file, _, rest = reference.partition("|")
        key, _, sampled = rest.rpartition("|every=") if re.search(r"\|every=\d+$", rest) else (rest, "", "")
        if not _FILE.fullmatch(file):
            raise UnreadError(f"{self.path}: {reference!r} names no tensor file of this recording; the row is damaged")
        folder = self._folder / f"rank{rank:05d}"
        path = folder / "tensors" / file
        if path not in self._readers:
            if folder in self._seals and path.exists() and (damage := self._seals[folder].damage(path)):
                raise UnreadError(damage)
            if len(self._readers) >= _OPEN_FILES:
                self._readers.pop(next(iter(self._readers)))
            self._readers[path] = TensorReader(path)
        return shaped(self._readers[path].read(key), dtype, shape, layout, sampled=bool(sampled), where=reference)


def shaped(
    stored: torch.Tensor, dtype: str, shape: tuple[int, ...], layout: str | None, *, sampled: bool, where: str
) -> torch.Tensor:
    """Return a stored value as its row says it looked; raise `UsageError` where the two do not fit."""
    import torch

    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise UnreadError(f"{where}: unknown dtype {dtype!r}; the row is damaged")
    flat = stored.reshape(-1)
    if flat.dtype != wanted:
        if flat.dtype != torch.uint8 or flat.numel() % wanted.itemsize:
            raise UnreadError(f"{where}: the row says {dtype}, the file {flat.dtype}; one of them is damaged")
        flat = flat.view(wanted)
    if sampled:
        return flat
    count = 1
    for size in shape:
        count *= size
    if count != flat.numel():
        raise UnreadError(f"{where}: the row says shape {list(shape)}, the file holds {flat.numel()} elements")
    if layout is None or layout.startswith("sparse"):  # of which the stored values were kept
        return flat.view(shape)
    strides = tuple(int(part) for part in layout.split(",") if part.isdigit())
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=False))
    if len(strides) != len(shape) or reach > flat.numel():
        raise UnreadError(f"{where}: strides {layout!r} do not fit shape {list(shape)}; the row is damaged")
    return flat.as_strided(shape, strides)


def _check(file: pq.ParquetFile) -> None:
    """Refuse a file that is not one of ours, before its data is read."""
    _check_size(file)
    missing = [name for name in SCHEMA.names if name not in file.schema_arrow.names]
    if missing:
        raise UnreadError(f"it has no column {', '.join(missing)}; it was not written by this version of bitwitness")


def _check_size(file: pq.ParquetFile) -> None:
    """Refuse what would fill the memory."""
    metadata = file.metadata
    if metadata.num_rows > _MOST_ROWS:
        raise UnreadError(f"it claims {metadata.num_rows} rows; a recording's file holds at most {_MOST_ROWS}")
    unpacked = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    if unpacked > _MOST_BYTES:
        raise UnreadError(f"it becomes {unpacked} bytes; a recording's file has at most {_MOST_BYTES}")


def _first_line(error: Exception) -> str:
    return shown((str(error).splitlines() or [type(error).__name__])[0])
