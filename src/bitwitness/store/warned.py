"""Which devices of a run read Warning, since when, and who cleared them.

    RUN/cleared.jsonl   who cleared which device, when and why: lines as in events.jsonl, sealed and numbered

A verdict that names a device under the reference systems' code makes it read Warning until somebody clears it; a later verdict
makes it read so again. A clearance counts the verdicts that it covers, so that clocks need not agree.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bitwitness.errors import UnwrittenError, UsageError
from bitwitness.files.shown import shown
from bitwitness.finding import Device, Note, Verdict, to_jsonable
from bitwitness.store.claim import open_private
from bitwitness.store.life import now
from bitwitness.store.reader import read_events
from bitwitness.store.seal import NUMBER, sealed

CLEARED = "cleared.jsonl"


@dataclass(frozen=True, slots=True)
class Clearance:
    """One line of ``cleared.jsonl``: of ``rank``'s device, ``verdicts`` of which are covered."""

    rank: int
    verdicts: int
    time: str
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Warned:
    """A device that was convicted: as which rank's, under which code, by how many verdicts, and the last clearance."""

    device: Device
    rank: int
    code: str
    since: int
    verdicts: int
    cleared: Clearance | None = None

    @property
    def on(self) -> bool:
        """Whether it reads Warning."""
        return self.cleared is None

    def line(self) -> str:
        """Return what ``status`` says of it."""
        who = f"device {shown(str(self.device))} (rank {self.rank})"
        if self.cleared is None:
            return f"{who}: Warning since step {self.since} ({shown(self.code)})"
        why = f": {shown(self.cleared.reason)}" if self.cleared.reason else ""
        past = f"was Warning since step {self.since} ({shown(self.code)})"
        return f"{who}: OK, cleared at {shown(self.cleared.time)} by {shown(self.cleared.by)}{why}; {past}"

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        cleared = None
        if self.cleared is not None:
            cleared = {"time": self.cleared.time, "by": self.cleared.by, "reason": self.cleared.reason}
        return {
            "device": asdict(self.device),
            "rank": self.rank,
            "health_status": "Warning" if self.on else "OK",
            "error_code": self.code,
            "since_step": self.since,
            "cleared": cleared,
        }


def warned_of(verdicts: Iterable[Verdict], clearances: Sequence[Clearance]) -> list[Warned]:
    """Return the devices that verdicts name under a code; of one that was cleared before, ``since`` is the next verdict."""
    covered = {one.rank: one for one in clearances}  # the last one counts
    found: dict[int, Warned] = {}
    for verdict in verdicts:
        for rank, device in zip(verdict.ranks, verdict.devices, strict=False) if verdict.fault_code else ():
            before = found.get(rank)
            count = 1 if before is None else before.verdicts + 1
            clearance = covered.get(rank)
            clear = clearance if clearance is not None and clearance.verdicts >= count else None
            anew = before is None or (clear is None and before.cleared is not None)
            since = verdict.step if before is None or anew else before.since
            found[rank] = Warned(device, rank, str(verdict.fault_code), since, count, clear)
    return list(found.values())


def read_clearances(run: Path) -> tuple[list[Clearance], list[str]]:
    """Return what was cleared in a run folder, and what of that could not be read."""
    file = run / CLEARED
    if not os.path.lexists(file):
        return [], []
    try:
        lines, problems = read_events(file)
    except UsageError as error:
        return [], [str(error)]
    found = []
    for line in lines:
        evidence = line.get("evidence") or {}
        try:
            rank, count = int(line["rank"]), int(evidence["verdicts"])
            found.append(Clearance(rank, count, str(line["time"]), str(evidence["by"]), str(evidence["reason"])))
        except (KeyError, TypeError, ValueError):
            problems.append(f"{file}: a line is no clearance, left out")
    return found, problems


def clear(run: Path, warned: Sequence[Warned], reason: str) -> list[Clearance]:
    """Append that devices are cleared; raises `UnwrittenError`. Who does it at the same time waits."""
    by = f"{_user()}@{socket.gethostname()}"
    done = []
    try:
        with open_private(run / CLEARED, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            number = sum(1 for line in text.splitlines() if line.strip())
            lines = "\n" if text and not text.endswith("\n") else ""  # after half a line
            for one in warned:
                time, number = now(), number + 1
                evidence = {"device": one.to_dict()["device"], "verdicts": one.verdicts, "by": by, "reason": reason}
                message = f"device {one.device} cleared by {by}{f': {reason}' if reason else ''}"
                note = Note(message, one.since, one.rank, "alerts", evidence=to_jsonable(evidence))
                lines += json.dumps(sealed({"time": time, NUMBER: number, **note.to_event()}), allow_nan=False) + "\n"
                done.append(Clearance(one.rank, one.verdicts, time, by, reason))
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UnwrittenError(f"cannot write {shown(run / CLEARED)}: {why}; nothing is cleared") from error
    return done


class Clearances:
    """Follows a run folder's ``cleared.jsonl`` while the run goes on; what cannot be read clears nothing."""

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self._seen: tuple[int, int] | None = None
        self._counts: dict[int, int] = {}

    def of(self, rank: int) -> int:
        """Return how many of a rank's verdicts were cleared; the file is read only where it has changed."""
        if self._run is None:
            return 0
        with suppress(OSError, UsageError):
            found = (self._run / CLEARED).stat()
            if self._seen != (found.st_mtime_ns, found.st_size):
                self._counts = {one.rank: one.verdicts for one in read_clearances(self._run)[0]}
                self._seen = found.st_mtime_ns, found.st_size
        return self._counts.get(rank, 0)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
