"""Numbered Parquet files of one rank: each gets its name, and its line in the seal, when it is whole."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bitwitness.store.seal import Seal


class TableFiles:
    """Writes ``FOLDER/KIND-000001.parquet``, ``KIND-000002.parquet``, …; what is there already is left alone.

    Parameters
    ----------
    folder
        The rank's folder in the run folder; made where it is missing.
    seal
        Takes their checksums.

    """

    def __init__(self, folder: Path, seal: Seal) -> None:
        self._folder = folder
        self._seal = seal
        self._parts: Counter[str] = Counter()

    def write(self, what: str, table: pa.Table) -> int:
        """Write a table into the next file of its kind; return the file's size. Raises `OSError`."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            self._parts[what] += 1
            path = self._folder / f"{what}-{self._parts[what]:06d}.parquet"
            if not path.exists():
                break
        part = path.with_name(path.name + ".part")
        try:
            with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                pq.write_table(
                    table, file, compression="zstd", compression_level=1, use_dictionary=_texts(table.schema)
                )
            self._seal.add(path.name, part)
            part.replace(path)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise
        return path.stat().st_size


def _texts(schema: pa.Schema) -> list[str]:
    """Return the columns that a dictionary makes smaller: of numbers it costs more than zstd needs without it."""
    return [field.name for field in schema if pa.types.is_dictionary(field.type) or pa.types.is_string(field.type)]
