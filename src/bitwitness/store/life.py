"""How a run's life is told in its ``run.json``: that it runs, how it ended, and what to make of one that says neither.

state    running, finished, stopped (by a verdict), failed (by an error), interrupted (Ctrl-C), terminated (SIGTERM);
a reader also tells killed (its process is gone without an end) and lost (on another host, long silent)
process  pid, host, boot and birth of rank 0's process, which tell whether it still lives
seen     the last sign of life, `BEAT_S` seconds apart at most while it trains
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

BEAT_S = 30.0
_SILENT = timedelta(minutes=10)
"""After this long without a sign of life a run on another host is taken for lost: twenty beats, or one very long step."""


def now() -> str:
    """Return the time, as a run folder tells it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def beginning() -> dict[str, Any]:
    """Return what ``run.json`` says of a run that begins in this process."""
    return {"state": "running", "process": this_process(), "seen": now()}


def this_process() -> dict[str, Any]:
    """Return what tells this process from all others."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "born": _born(os.getpid())}


@dataclass(frozen=True, slots=True)
class Life:
    """Whether a run lives, or how it ended.

    Attributes
    ----------
    state
        One word, see above; ``unknown`` where ``run.json`` says nothing that can be understood.
    by
        What ended it, in a few words; empty if nothing is known.

    """

    state: str
    by: str = ""

    @property
    def whole(self) -> bool:
        """Whether the training came to its own end."""
        return self.state == "finished"


def life_of(description: Mapping[str, Any]) -> Life:
    """Tell whether a run lives, or how it ended, from its ``run.json``."""
    state, by = description.get("state"), description.get("ended_by")
    if state != "running":
        return Life(state if isinstance(state, str) else "unknown", by if isinstance(by, str) else "")
    process = description.get("process")
    seen = _time(description.get("seen"))
    ago = "" if seen is None else f"; last sign of life {_said(datetime.now(UTC) - seen)} ago"
    if not isinstance(process, dict) or not isinstance(process.get("pid"), int):
        return Life("unknown", "its run.json names no process")
    if process.get("host") == socket.gethostname() and process.get("boot") == _boot():
        alive = _born(process["pid"]) == process.get("born") is not None
        return Life("running", ago[2:]) if alive else Life("killed", f"its process ended without a word{ago}")
    if process.get("host") == socket.gethostname() and _boot() is not None:
        return Life("killed", f"the machine was started anew{ago}")
    if seen is not None and datetime.now(UTC) - seen > _SILENT:
        return Life("lost", f"on host {process.get('host')}{ago}")
    return Life("running", f"on host {process.get('host')}{ago}")


def _boot() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return None


def _born(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks; None if there is none, or if it is not told here."""
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    return None


def _time(text: Any) -> datetime | None:
    with suppress(ValueError, TypeError):
        found = datetime.fromisoformat(text)
        return found if found.tzinfo is not None else None
    return None


def _said(span: timedelta) -> str:
    seconds = max(0, int(span.total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
