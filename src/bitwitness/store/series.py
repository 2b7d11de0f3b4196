"""Writes the series of a monitored run while the training goes on: a thread of its own makes tables of what it is handed.

RUN/rank00000/monitor-000001.parquet        rows of `bitwitness.store.monitored`, some seconds of training a file
RUN/rank00000/seal.jsonl                    their checksums
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from bitwitness.store.background import Background
from bitwitness.store.seal import SEAL, Seal
from bitwitness.store.tablefile import TableFiles

_ROWS_KEPT = 200_000
_SECONDS_KEPT = 10.0
"""After this time rows are written though they are few, so that a run can be looked at while it goes on."""


class SeriesWriter:
    """Writes one rank's series.

    Parameters
    ----------
    folder
        The rank's folder in the run folder; made where it is missing.
    failed
        Told once, from the writer's thread, why writing ended.

    """

    def __init__(self, folder: Path, failed: Callable[[str], None]) -> None:
        self._folder = folder
        self._background = Background("bitwitness-monitor", folder, self._write, failed)
        self._files = TableFiles(folder, Seal(folder))
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._since = time.monotonic()
        self.steps_written = 0
        self.bytes_written = 0
        self._background.start()

    @property
    def broken(self) -> str | None:
        """Why nothing is written any more, or None."""
        return self._background.broken

    def step(self, table: Callable[[], pa.Table]) -> None:
        """Hand over what makes a step's rows; called on the writer's thread, where it may wait for a device."""
        self._background.put(lambda: self._take(table()))

    def then(self, action: Callable[[], None]) -> None:
        """Have something done on the writer's thread, after what was handed over before."""
        self._background.put(action)

    def flush(self) -> None:
        """Have everything so far written, and wait for it."""
        self._background.flush()

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._background.close()

    def delete(self) -> None:
        """End, and delete what was written: it is of a step that never ended."""
        self.close()
        for pattern in ("monitor-*.parquet", SEAL):
            for path in self._folder.glob(pattern):
                with suppress(OSError):
                    path.unlink()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _take(self, table: pa.Table) -> None:
        self._tables.append(table)
        self._rows += table.num_rows
        self.steps_written += 1
        if self._rows >= _ROWS_KEPT or time.monotonic() - self._since >= _SECONDS_KEPT:
            self._write()

    def _write(self) -> None:
        self._since = time.monotonic()
        if self._tables:
            table = pa.concat_tables(self._tables).unify_dictionaries()
            self._tables.clear()
            self._rows = 0
            self.bytes_written += self._files.write("monitor", table)
