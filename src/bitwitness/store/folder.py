"""A run folder, for reading: what was found, concluded and recorded, a piece at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.finding import Event, Finding, Note, Verdict, event_of
from bitwitness.store.reader import read_description, read_events
from bitwitness.store.rows import SCHEMA
from bitwitness.store.run import RunSource, is_recording
from bitwitness.store.tensorfile import TensorReader

if TYPE_CHECKING:
    import torch

    from bitwitness.store.source import Source

_SHARED = "events.jsonl"
_KEPT = re.compile(r"rank\d+/tensors/\w[\w.-]*\.safetensors", re.ASCII)
"""A file of tensors that an event names as its evidence, in the run folder."""
_EXPECTED = "expected a run folder (what --out or out= names), a dump of msprobe or a folder of Ascend dump files"


class Run:
    """What a guarded or a recorded run left behind. Nothing is read before it is asked for.

    ::

        run = bw.Run("run/")
        for verdict in run.verdicts():
            print(verdict.step, verdict.cause, verdict.devices)
        table = run.rows(step=40)  # a pyarrow Table
        value = run.tensor(table.slice(7, 1).to_pylist()[0])

    Parameters
    ----------
    path
        The folder: what ``out`` or ``--out`` named. A recording by msprobe or a folder of Ascend dump files has rows, too.

    Attributes
    ----------
    problems
        What could not be read so far, one sentence each. The rest is read.

    Raises
    ------
    UsageError
        If there is no such folder, or nothing in it that bitwitness reads.

    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            seen = "is a file" if self.path.exists() else f"does not exist (seen from {Path.cwd()})"
            raise UsageError(f"{self.path} {seen}; {_EXPECTED}")
        self._problems: list[str] = []
        try:
            _ = self.description  # kept, so that it is read once
        except UsageError as error:
            if not any(self.path.glob("rank*/events.jsonl")):
                self._source  # noqa: B018 - raises where there is nothing else either
            elif (self.path / "run.json").exists():
                self._note([str(error)])

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def problems(self) -> list[str]:
        """What could not be read so far."""
        _ = self._records  # damaged rows are noticed as soon as they are looked for
        return [*self._problems, *(self._source.problems if "_source" in vars(self) else ())]

    @cached_property
    def description(self) -> dict[str, Any]:
        """The contents of ``run.json``: configuration, versions, world size, devices.

        Raises
        ------
        UsageError
            If there is none, or it is damaged.

        """
        return read_description(self.path)

    # -- events ------------------------------------------------------------------------------------------------------

    def events(self, rank: int | None = None) -> Iterator[Event]:
        """Yield findings, verdicts and notes as they were written: of one rank, or of all ranks together.

        Without ``rank`` these are the verdicts and the findings behind them (``events.jsonl``); each rank's own file also has
        its notes and the suspicions that came to nothing. A folder that has no such file yields nothing.
        """
        file = self.path / (_SHARED if rank is None else f"rank{rank:05d}/{_SHARED}")
        try:
            file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._note([f"cannot read {shown(file)}: {error.strerror}"])
            return
        try:
            lines, problems = read_events(file)
        except UsageError as error:  # a folder, say: the other ranks' files may tell of a verdict
            self._note([str(error)])
            return
        self._note(problems)
        for number, line in enumerate(lines, start=1):
            try:
                yield event_of(line)
            except UsageError as error:
                self._note([f"{file}: event {number} was left out: {error}"])

    def verdicts(self) -> list[Verdict]:
        """Return what was concluded, in the order of time, each once."""
        return [event for event in self.events() if isinstance(event, Verdict)]

    def findings(self) -> list[Finding]:
        """Return all ranks' suspicions, rank by rank."""
        return [event for rank in self.ranks() for event in self.events(rank) if isinstance(event, Finding)]

    def notes(self) -> list[Note]:
        """Return all ranks' remarks, rank by rank; the last of each is its coverage."""
        return [event for rank in self.ranks() for event in self.events(rank) if isinstance(event, Note)]

    def ranks(self) -> list[int]:
        """Return the ranks that left anything."""
        names = (folder.name.removeprefix("rank") for folder in self.path.glob("rank*") if folder.is_dir())
        return sorted({int(name) for name in names if name.isascii() and name.isdigit()} | set(self._recorded_ranks()))

    # -- rows --------------------------------------------------------------------------------------------------------

    def steps(self, rank: int | None = None) -> list[int]:
        """Return the steps that were recorded, by one rank or by any; none where nothing was recorded."""
        ranks = self._recorded_ranks() if rank is None else [rank]
        return sorted({step for number in ranks for step in self._source.steps(number)}) if self._records else []

    def rows(self, *, step: int | None = None, rank: int | None = None) -> pa.Table:
        """Return recorded rows (`bitwitness.store.rows` tells of the columns), of one step or one rank or all.

        Raises
        ------
        UsageError
            If nothing was recorded.

        """
        source = self._source
        tables = [
            source.table(number, which)
            for number in (source.ranks() if rank is None else [rank])
            for which in source.steps(number)
            if step is None or step == which
        ]
        return pa.concat_tables(tables) if tables else SCHEMA.empty_table()

    def tensor(self, row: dict[str, Any]) -> torch.Tensor:
        """Return the value that a row tells of, where it was kept (``content="tensors"``).

        Parameters
        ----------
        row
            One row of `rows`, as ``table.to_pylist()`` gives it.

        Raises
        ------
        UsageError
            If the value was not kept, or is damaged.

        """
        if row.get("tensor") is None:
            raise UsageError(
                f"{self.path}: the value of this row was not kept; record with content='tensors' (--content tensors)"
            )
        shape = tuple(row["shape"] or ())
        return self._source.tensor(row["rank"], row["tensor"], row["dtype"], shape, row["layout"])

    def stacks(self, rank: int) -> dict[int, str]:
        """Return a rank's call stacks by the number that rows give, innermost line first."""
        return self._source.stacks(rank)

    @cached_property
    def _source(self) -> Source:
        from bitwitness.store.opening import open_source

        return open_source(self.path)

    @cached_property
    def _records(self) -> bool:
        try:
            return bool(self._source.ranks())
        except UsageError as error:
            if is_recording(self.path):
                self._note([str(error)])
            return False

    def check(self) -> None:
        """Look at every byte of what was recorded; what is damaged is among the `problems` from then on."""
        if self._records and isinstance(self._source, RunSource):
            self._source.check()
        for rank in self.ranks():
            # Several findings of a step share a file.
            kept = ((event, (event.evidence or {}).get("tensors")) for event in self.events(rank))
            named = {name: event.step for event, name in kept if isinstance(name, str) and _KEPT.fullmatch(name)}
            for name, step in named.items():
                self._note(self._damage(name, step))

    def _damage(self, name: str, step: int) -> list[str]:
        """Return what is wrong with a file of tensors that were kept as a step's evidence."""
        try:
            return TensorReader(self.path / name).damage()
        except UsageError as error:
            return [f"{error} (evidence of step {step})"]

    def _recorded_ranks(self) -> list[int]:
        return self._source.ranks() if self._records else []

    def _note(self, problems: list[str]) -> None:
        self._problems += [problem for problem in problems if problem not in self._problems]
