"""Writes one rank's part of a run folder. Never fails into the training: what cannot be recorded is said and counted.

    RUN/run.json                    what ran: configuration, versions, ranks, devices (rank 0)
    RUN/events.jsonl                verdicts and notes that concern all ranks (rank 0)
    RUN/rank00000/events.jsonl      this rank's own findings, verdicts and notes

A folder that holds an earlier run is kept: the new run goes beside it, into ``RUN-2``, ``RUN-3``, …, the same on all ranks.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitwitness.finding import Event, to_jsonable

SCHEMA = 1
_SECRET = ("key", "token", "secret", "password", "passwd", "credential")


class RunWriter:
    """One rank's writer.

    Parameters
    ----------
    path
        The run folder. See `free_folder` for how ranks agree on one that is not taken.
    rank, world_size
        Who writes.

    """

    def __init__(self, path: str | os.PathLike[str], rank: int, world_size: int) -> None:
        self.path = Path(path)
        self.rank = rank
        self.dropped = 0
        self._fields: dict[str, Any] = {
            "schema": SCHEMA,
            "world_size": world_size,
            "command": redacted(sys.argv),
            "started": _now(),
            "versions": {"python": platform.python_version(), **_versions()},
        }
        self._broken: str | None = None
        try:
            self._own = self.path / f"rank{rank:05d}"
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(OSError):
                self.path.chmod(0o700)
        except OSError as error:
            self._fail(error)

    def event(self, event: Event) -> None:
        """Append to this rank's events, at once."""
        self._append(f"rank{self.rank:05d}/events.jsonl", event)

    def shared_event(self, event: Event) -> None:
        """Append to the file of all ranks; one rank keeps it."""
        if self.rank == 0:
            self._append("events.jsonl", event)

    def describe(self, **fields: Any) -> None:
        """Set fields of ``run.json`` and rewrite it, whole or not at all; rank 0 only."""
        if self.rank or self._broken is not None:
            return
        self._fields |= to_jsonable(fields)
        temporary = self.path / "run.json.part"
        try:
            temporary.write_text(json.dumps(self._fields, indent=1, allow_nan=False) + "\n")
            temporary.replace(self.path / "run.json")
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Say what was not recorded."""
        if self.dropped:
            _say(f"rank {self.rank}: {self.dropped} events were not recorded in {self.path}: {self._broken}")

    def _append(self, name: str, event: Event) -> None:
        if self._broken is not None:
            self.dropped += 1
            return
        line = json.dumps({"time": _now(), **event.to_event()}, allow_nan=False) + "\n"
        try:
            # Opened anew each time: events are few, and a full disk shows at once and not when the file is closed.
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._fail(error)
            self.dropped += 1

    def _fail(self, error: OSError) -> None:
        if self._broken is None:
            self._broken = f"{error.strerror or error} ({error.filename or self.path})"
            _say(
                f"rank {self.rank}: cannot write to the run folder {self.path}: {self._broken}. The training goes on; from "
                "here on nothing is recorded, and findings are printed only. Free the space or give another --out"
            )


def free_folder(path: str | os.PathLike[str]) -> Path:
    """Return ``path``, or ``path-2``, ``path-3``, … if it holds a run already. Ask on one rank and tell the others."""
    wanted = Path(path)
    number = 1
    candidate = wanted
    while (candidate / "run.json").exists():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


def redacted(arguments: list[str]) -> list[str]:
    """Return a command line in which the values of arguments that name a secret are left out."""
    result: list[str] = []
    hide = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = any(word in name.lower() for word in _SECRET)
        if hide and not argument.startswith("-"):
            result.append("***")
        elif secret and equals:
            result.append(f"{name}=***")
        else:
            result.append(argument)
        hide = secret and not equals and argument.startswith("-")
    return result


def _versions() -> dict[str, str]:
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "numpy", "transformers")}
    return {name: str(version) for name, version in found.items() if version is not None}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(f"bitwitness: {text}\n")
        sys.stderr.flush()
