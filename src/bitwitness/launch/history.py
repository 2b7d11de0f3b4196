"""The launcher's own record: ``launch.json`` in its folder, rewritten whole at every turn."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwitness.errors import UnwrittenError, UsageError
from bitwitness.files.writing import write_text
from bitwitness.launch.decide import Next
from bitwitness.launch.ended import Ended
from bitwitness.launch.order import Report
from bitwitness.launch.quarantine import key_of
from bitwitness.store.claim import make_folder
from bitwitness.store.launched import LAUNCH
from bitwitness.store.life import BEAT_S, beginning, now
from bitwitness.store.redact import redacted

_SCHEMA = 1


@dataclass
class History:
    """What was launched, how each attempt ended, and what followed.

    Parameters
    ----------
    folder
        Where; it is made.
    alone
        Whether this is the only node.

    Attributes
    ----------
    path
        The file.

    """

    folder: Path
    alone: bool

    def __post_init__(self) -> None:
        try:
            make_folder(self.folder)
        except OSError as error:
            raise UsageError(f"--out {self.folder}: {error.strerror}; name another folder") from error
        name = LAUNCH if self.alone else f"launch-{socket.gethostname()}-{os.getpid()}.json"
        self.path = self.folder / name
        self._beaten = 0.0
        self._torn = False
        self._told: dict[str, Any] = {
            "schema": _SCHEMA,
            "node": socket.gethostname(),
            "command": redacted(sys.argv),
            "started": now(),
            **beginning(),
            "sentence": "attempt 1 is about to begin",
            "attempts": [],
        }
        self._write()

    def begins(self, number: int, run: Path, resume_before: int | None) -> None:
        """Note that an attempt begins."""
        self._told["attempts"].append(
            {"number": number, "run": run.name, "started": now(), "resume_before": resume_before, "end": None}
        )
        self._told["sentence"] = f"attempt {number} runs"
        self._rewrite()

    def follows(self, follows: Next) -> None:
        """Note what follows from the attempt's end."""
        attempt = self._told["attempts"][-1]
        attempt |= {"quarantined": [key_of(device) for device in follows.quarantine], "again": follows.again}
        self._told["sentence"] = follows.why
        self._rewrite()

    def beat(self) -> None:
        """Leave a sign of life, now and then: on another host nobody sees whether this process lives."""
        if time.monotonic() - self._beaten >= BEAT_S:
            self._told["seen"] = now()
            self._rewrite()

    def ended(self, ended: Ended, report: Report | None) -> None:
        """Note how the attempt ended on this node."""
        attempt = self._told["attempts"][-1]
        attempt |= {
            "ended": now(),
            "end": str(ended.end),
            "message": ended.message,
            "code": ended.code,
            "certain": ended.certain,
            "step": ended.step,
            "first_trace": ended.trace,
            "devices": [key_of(device) for device in ended.devices],
        }
        if report is not None:
            attempt |= {"slots": report.slots, "left_out": report.left_out, "world_size": report.world_size}
            attempt |= {"ranks": report.ranks, "failures": {str(rank): code for rank, code in report.failures.items()}}
        self._told["sentence"] = ended.message
        self._rewrite()

    def closes(self, state: str, sentence: str, code: int) -> None:
        """Note how it all ended; ``state``: a word of `bitwitness.store.life`."""
        self._told |= {"state": state, "ended": now(), "ended_by": sentence, "sentence": sentence, "exit_code": code}
        self._rewrite()

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return self._told

    @property
    def attempts(self) -> Sequence[dict[str, Any]]:
        """What was noted of each attempt."""
        found: list[dict[str, Any]] = self._told["attempts"]
        return found

    def _write(self) -> None:
        self._beaten = time.monotonic()
        write_text(self.path, json.dumps(self._told, indent=1) + "\n", mode=0o600)

    def _rewrite(self) -> None:
        """Write what has changed; a disk that is full by now ends no training."""
        try:
            self._write()
            self._torn = False
        except UnwrittenError as error:
            if not self._torn:
                sys.stderr.write(f"bitwitness launch: {error}; the job goes on, and its history is not written\n")
            self._torn = True
