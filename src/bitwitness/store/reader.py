"""Reads what a run folder holds; a damaged line is named, and the rest is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError


def read_events(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the events of an ``events.jsonl`` and what could not be read of it.

    Raises
    ------
    UsageError
        If there is no such file.

    """
    file = Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}; expected the events.jsonl of a run folder") from error
    events: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            problems.append(f"{file}:{number}: half-written or damaged, left out")
            continue
        if isinstance(event, dict):
            events.append(event)
        else:
            problems.append(f"{file}:{number}: not an event, left out")
    return events, problems


def read_description(path: Path) -> dict[str, Any]:
    """Return a run folder's ``run.json``.

    Raises
    ------
    UsageError
        If there is none, or it is damaged.

    """
    file = path if path.name == "run.json" else path / "run.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {file}: {error.strerror}; expected a run folder (what --out or out= names)"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is damaged: {error}; expected the run.json that bitwitness writes") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} holds no object; expected the run.json that bitwitness writes")
    return found
