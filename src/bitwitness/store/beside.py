"""The run folders of one process's other models, which lie beside the first one's: ``RUN-2`` and so on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.store.claim import clear_run
from bitwitness.store.reader import read_description

_MOST = 1000
"""Models of one process: a loop over names that exist needs an end that does not depend on them."""


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
    folder = Path(os.path.abspath(path))
    for number in range(2, _MOST):
        beside = folder.with_name(f"{folder.name}-{number}")
        try:
            if not (beside / "run.json").is_file():
                break
            other = read_description(beside)
            # Another rank of the job may have been the first to claim a folder that its ranks share.
            mine = other.get("process") == process or (job is not None and other.get("job") == job)
        except (UsageError, OSError):
            yield beside, None if next(beside.glob("rank[0-9]*"), None) is not None else False
        else:
            yield beside, mine


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
