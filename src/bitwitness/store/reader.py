"""Reads what a run folder holds; a damaged line is named, and the rest is read."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bitwitness.errors import UnreadError
from bitwitness.files.reading import parsed_json, read_bytes, read_object
from bitwitness.store.seal import FIELD, NUMBER, is_intact


def read_events(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the events of an ``events.jsonl`` and what could not be read of it.

    Raises
    ------
    UsageError
        If there is no such file.
    UnreadError
        If it may not be read.

    """
    file = Path(path)
    events: list[dict[str, Any]] = []
    problems: list[str] = []
    last = 0
    for number, line in enumerate(read_bytes(file, "the events.jsonl of a run folder").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            event = parsed_json(line, file, "an event")
        except UnreadError:
            problems.append(f"{file}:{number}: half-written or damaged, left out")
            continue
        if not isinstance(event, dict):
            problems.append(f"{file}:{number}: not an event, left out")
        elif not is_intact(event):
            problems.append(f"{file}:{number}: damaged (its checksum differs), left out")
        else:
            place = event.pop(NUMBER, None)
            if place not in (None, last + 1, 1):  # another rank may go on with the file, and counts from 1
                problems.append(
                    f"{file}:{number}: events before this one are missing (it is number {place}, after {last})"
                )
            last = place if isinstance(place, int) else last + 1
            del event[FIELD]
            events.append(event)
    return events, problems


def read_description(path: Path) -> dict[str, Any]:
    """Return a run folder's ``run.json``.

    Raises
    ------
    UsageError
        If there is none.
    UnreadError
        If it is damaged.

    """
    file = path if path.name == "run.json" else path / "run.json"
    found = read_object(file, "the run.json of a run folder (what --out or out= names)", strict=True)
    if not is_intact(found):
        raise UnreadError(f"{file} is damaged (its checksum differs); expected the run.json that bitwitness writes")
    del found[FIELD]
    return found


def ranks_there(path: str | os.PathLike[str]) -> list[int]:
    """Return the ranks that have a folder in a run's."""
    return sorted(int(folder.name[4:]) for folder in Path(path).glob("rank[0-9]*") if folder.name[4:].isdecimal())


def absent_ranks(description: Mapping[str, Any], there: Collection[int]) -> list[str]:
    """Return what is told of ranks that took part and left nothing; ``description``: the ``run.json``."""
    size, recording = description.get("world_size"), description.get("recording")
    chosen = isinstance(recording, dict) and recording.get("ranks")
    if not isinstance(size, int) or chosen or len(there) >= size:
        return []
    gone = [str(rank) for rank in range(min(size, 10_000)) if rank not in there]
    return [f"{len(gone)} of {size} ranks left nothing: {', '.join(gone[:8])}{', …' * (len(gone) > 8)}"]
