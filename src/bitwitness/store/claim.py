"""Run folders, and which are taken: an earlier run is never written into, and not taken away unless that was asked for.

A folder that holds a run is kept: what begins in the same process goes beside it, into ``RUN-2``, ``RUN-3``, …, the same on all
ranks, and whoever asked for it is told. The command line refuses it before the training begins.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

from bitwitness.store.life import beginning
from bitwitness.store.seal import SEAL, sealed

SCHEMA = 2
"""The run folder's format; it goes up where an older reader would misunderstand a newer folder. 2: checksums."""
_OURS = 0o700  # only the user may read it: values, command lines and paths are the user's
_WRITTEN = (
    "stats-*.parquet",
    "stacks-*.parquet",
    "monitor-*.parquet",
    "tensors/*.safetensors",
    "*.part",
    "tensors/*.part",
    "events.jsonl",
    SEAL,
)
"""What a rank writes into its folder. The seal goes last: what a kill in between leaves is known to lack something."""


def holds_run(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is taken: by a run of ours, or by somebody else's ``run.json``."""
    folder = Path(path)
    return os.path.lexists(folder / "run.json") or any(folder.glob("rank[0-9]*/*"))


def clear_run(path: str | os.PathLike[str]) -> None:
    """Delete a run of ours, and nothing that others put beside it; raises `OSError`."""
    folder = Path(path)
    for rank in [rank for rank in folder.glob("rank[0-9]*") if rank.is_dir() and not rank.is_symlink()]:
        for pattern in _WRITTEN:
            for file in rank.glob(pattern):
                file.unlink()
        for empty in (rank / "tensors", rank):
            with suppress(OSError):
                empty.rmdir()
    for name in ("events.jsonl", "cleared.jsonl", "run.json", "run.json.part"):
        (folder / name).unlink(missing_ok=True)


def claim_folder(path: str | os.PathLike[str]) -> Path:
    """Return ``path``, or ``path-2``, ``path-3``, … if it holds a run already, and mark it as taken.

    Ask on one rank and tell the others. Of two trainings that ask at the same time each gets its own: the mark is a
    ``run.json`` that is created only if there is none. Where nothing can be written ``path`` is returned, for the writer
    to say why.
    """
    wanted = Path(os.path.abspath(path))  # a script may change its directory
    folder, number = wanted, 1
    while True:
        with suppress(OSError):
            make_folder(folder)
            if not _mark(folder):
                number += 1
                folder = Path(f"{wanted}-{number}")
                continue
        return folder


def release_folder(path: str | os.PathLike[str], rank: int) -> None:
    """Give back a folder that was claimed for a training that did not begin; what others put into it stays.

    The last of its ranks to leave takes its ``run.json`` away: ranks that train each by themselves share it.
    """
    folder = Path(path)
    with suppress(OSError):
        (folder / f"rank{rank:05d}" / "events.jsonl").unlink(missing_ok=True)
        (folder / f"rank{rank:05d}").rmdir()
        if not any(folder.glob("rank[0-9]*")):
            (folder / "run.json").unlink(missing_ok=True)
        if folder.stat().st_mode & 0o777 == _OURS:
            folder.rmdir()


def _mark(folder: Path) -> bool:
    """Take a folder; return whether it was free."""
    try:
        with open_private(folder / "run.json", "x") as file:
            json.dump(sealed({"schema": SCHEMA, **beginning()}), file)
    except FileExistsError:
        return False
    return True


def make_folder(path: Path) -> None:
    """Make a folder that only its owner may look into, unless there is one; raises `OSError`."""
    path.mkdir(mode=_OURS, parents=True, exist_ok=True)


def open_private(path: Path, mode: str) -> TextIO:
    """Open a text file that, where it is new, only its owner may read."""
    return cast("TextIO", open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)))
