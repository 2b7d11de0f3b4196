"""The run folders of one process's other models, which lie beside the first one's: ``RUN-2`` and so on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.store.claim import clear_run
from bitwitness.store.reader import read_description


def runs_beside(path: str | os.PathLike[str], description: Mapping[str, Any]) -> list[Path]:
    """Return the folders in which the process of a run recorded its other models; ``description``: the run's ``run.json``.

    Where it cannot be told whose a folder is it counts: damage to a run of ours is no all-clear.
    """
    return [beside for beside, mine in _beside(path, description) if mine is not False]


def runs_of_process(path: str | os.PathLike[str]) -> list[Path]:
    """Return all folders in which the process of a run recorded its models, its own among them, by their numbers."""
    folder = Path(os.path.abspath(path))
    first = folder.with_name(folder.name.rpartition("-")[0] or folder.name)
    try:
        description = read_description(folder)
        if first != folder and (first / "run.json").is_file() and folder in runs_beside(first, description):
            folder = first
        return [folder, *runs_beside(folder, description)]
    except (UsageError, OSError):
        return []


def _beside(path: str | os.PathLike[str], description: Mapping[str, Any]) -> Iterator[tuple[Path, bool | None]]:
    """Yield the runs that lie beside one by their numbers, and whether they are of its process; None: it cannot be told."""
    process = description.get("process")
    job = description.get("job")
    if not isinstance(process, dict):
        return
    for beside in _numbered(Path(os.path.abspath(path))):
        try:
            if not (beside / "run.json").is_file():
                continue  # of what turned out to be a part of a model
            other = read_description(beside)
            # Another rank of the job may have been the first to claim a folder that its ranks share.
            mine = other.get("process") == process or (job is not None and other.get("job") == job)
        except (UsageError, OSError):
            yield beside, None if next(beside.glob("rank[0-9]*"), None) is not None else False
        else:
            yield beside, mine


def _numbered(folder: Path) -> list[Path]:
    """Return what lies beside a folder under its name and a number, in order; numbers may be left out."""
    with suppress(OSError):
        named = ((one, one.name.removeprefix(f"{folder.name}-")) for one in folder.parent.iterdir())
        numbers = {
            int(rest): one for one, rest in named if one.name != rest and re.fullmatch(r"[1-9]\d{0,3}", rest, re.ASCII)
        }
        return [numbers[number] for number in sorted(numbers) if number > 1]
    return []


def clear_process(path: str | os.PathLike[str]) -> None:
    """Delete a run and the others of its process, as far as they say that they are; raises `OSError`.

    What others put into the folders stays.
    """
    with suppress(UsageError):
        for beside in [beside for beside, mine in _beside(path, read_description(Path(path))) if mine]:
            clear_run(beside)
            with suppress(OSError):  # not empty
                beside.rmdir()
    clear_run(path)
