"""Writes a recording while the training goes on: a thread of its own takes rows and tensors from a bounded queue.

    RUN/rank00000/stats-000001.parquet          rows (`bitwitness.store.rows`), some seconds of training a file
    RUN/rank00000/stacks-000001.parquet         call stacks by number
    RUN/rank00000/tensors/step00000010-000001.safetensors
    RUN/rank00000/seal.jsonl                                 checksums of all of them (`bitwitness.store.seal`)

Every file gets its name when it is whole, so that what a killed process leaves is readable; at most the last flush is lost.
Kept tensors are followed by their rows at the end of their step: one without the other could not be read.
A disk that fills up ends the recording with a note, and not the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bitwitness.store.background import Background
from bitwitness.store.rows import STACKS, Measured, to_table
from bitwitness.store.seal import SEAL, Seal
from bitwitness.store.tablefile import TableFiles
from bitwitness.store.tensorfile import ENTRY_BYTES, TensorFile

if TYPE_CHECKING:
    import torch

_ROWS_KEPT = 50_000
"""Rows of one file of the table: fewer make Parquet's columns compress badly, more are lost when a process is killed."""
_SECONDS_KEPT = 10.0
"""After this time a step's rows are written though they are few, so that a run can be looked at while it goes on."""
_FILE_BYTES = 16 << 30
"""Of one file of tensors; a file bears its name only when it is whole, so that a killed process loses no more than one."""
_FIRST_RESERVE = 64 << 10  # bytes left in front of a file for its header: some 300 tensors
_MORE_RESERVE = 8  # times as much, once a header did not fit; later files begin with that


class _FileNames:
    """Decides in which file a tensor goes: a new one for each step, and where a header or a file is full."""

    def __init__(self) -> None:
        self._step = -1
        self._number = 0
        self._used = 0
        self._size = 0
        self._reserve = _FIRST_RESERVE

    def place(self, step: int, key: str, nbytes: int) -> tuple[str, int]:
        """Return the file's name, and the room for its header in bytes."""
        entry = len(key.encode()) + ENTRY_BYTES
        if step != self._step:
            self._step, self._number = step, 0
            self._begin()
        elif self._used + entry > self._reserve:
            self._reserve *= _MORE_RESERVE  # later steps have as many tensors, and begin with this
            self._begin()
        elif self._size + nbytes > _FILE_BYTES:
            self._begin()
        self._used += entry
        self._size += nbytes
        return f"step{step:08d}-{self._number:06d}.safetensors", max(self._reserve, entry + 16)

    def _begin(self) -> None:
        self._number += 1
        self._used, self._size = 2, 0


class RecordingWriter:
    """Writes one rank's rows and tensors.

    Parameters
    ----------
    folder
        The rank's folder in the run folder; made where it is missing.
    rank
        Whose rows they are.
    failed
        Told once, from the writer's thread, why writing ended.

    """

    def __init__(self, folder: Path, rank: int, failed: Callable[[str], None] = lambda _: None) -> None:
        self._folder = folder
        self._rank = rank
        self._background = Background("bitwitness-recording", folder, self._write_all, failed, self._break)
        self.bytes_written = 0
        self.files_written = 0
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._since = time.monotonic()
        self._stacks: list[tuple[int, str]] = []
        self._seal = Seal(folder)
        self._files = TableFiles(folder, self._seal)
        self._file: TensorFile | None = None
        self._names = _FileNames()
        self._background.start()

    @property
    def broken(self) -> str | None:
        """Why nothing is written any more, or None."""
        return self._background.broken

    # -- called by the training ----------------------------------------------------------------------------------

    def rows(
        self,
        rows: Sequence[tuple[Any, ...]],
        values: Callable[[], dict[int, Measured]],
        stacks: Sequence[tuple[int, str]],
    ) -> None:
        """Hand over rows with what yields their values' statistics (called on the writer's thread), and new stacks."""
        self._background.put(lambda: self._take_rows(rows, values, stacks))

    def tensor(self, step: int, key: str, tensor: torch.Tensor, ready: Callable[[], None] = lambda: None) -> str:
        """Hand over a contiguous CPU tensor that nobody else writes to; return where it will lie: ``file|key``.

        ``ready`` waits until it is filled.
        """
        file, reserve = self._names.place(step, key, tensor.nbytes)

        def write() -> None:
            ready()
            self._take_tensor(file, reserve, key, tensor)

        self._background.put(write, size=tensor.nbytes)
        return f"{file}|{key}"

    def step_ended(self) -> None:
        """Close the step's tensor file, and write rows that have waited long."""
        self._background.put(self._end_step)

    def flush(self) -> None:
        """Have everything so far written, and wait for it."""
        self._background.flush()

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._background.close()

    def delete(self) -> None:
        """End, and delete what was written: it is of a step that never ended."""
        self.close()
        for pattern in ("stats-*", "stacks-*", "tensors/step*", SEAL):
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # there is none
            (self._folder / "tensors").rmdir()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _break(self) -> None:
        if self._file is not None:
            self._file.abandon()  # which may free what the rows of the steps before need
            self._file = None
        with suppress(Exception):
            self._write_rows()
        self._tables.clear()

    def _take_rows(
        self,
        rows: Sequence[tuple[Any, ...]],
        values: Callable[[], dict[int, Measured]],
        stacks: Sequence[tuple[int, str]],
    ) -> None:
        self._stacks += stacks
        if rows:
            self._tables.append(to_table(self._rank, rows, values()))
            self._rows += len(rows)
        if self._rows >= _ROWS_KEPT:
            self._write_rows()

    def _take_tensor(self, file: str, reserve: int, key: str, tensor: torch.Tensor) -> None:
        if self._file is not None and self._file.path.name != file:
            self._end_file()
        if self._file is None:
            folder = self._folder / "tensors"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = TensorFile(folder / file, reserve)
        self._file.add(key, tensor)
        self.bytes_written += tensor.nbytes

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close(self._seal)
            self._file = None
            self.files_written += 1

    def _end_step(self) -> None:
        kept = self._file is not None
        self._end_file()
        if self._rows and (kept or time.monotonic() - self._since >= _SECONDS_KEPT):
            self._write_rows()

    def _write_all(self) -> None:
        self._end_file()
        self._write_rows()

    def _write_rows(self) -> None:
        self._since = time.monotonic()
        if self._stacks:
            numbers, texts = zip(*self._stacks, strict=True)
            self._write("stacks", pa.Table.from_arrays([pa.array(numbers, pa.int32()), pa.array(texts)], schema=STACKS))
            self._stacks.clear()
        if self._tables:
            table = pa.concat_tables(self._tables).unify_dictionaries()
            self._tables.clear()
            self._rows = 0
            self._write("stats", table)

    def _write(self, what: str, table: pa.Table) -> None:
        self.bytes_written += self._files.write(what, table)
        self.files_written += 1
