"""The launcher's own record: ``launch.json`` in its folder, rewritten whole at every turn."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.files.writing import write_text
from bitwitness.launch.decide import Next
from bitwitness.launch.ended import Ended
from bitwitness.launch.order import Report
from bitwitness.launch.quarantine import key_of
from bitwitness.store.claim import make_folder
from bitwitness.store.launched import LAUNCH
from bitwitness.store.life import beginning, now
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
        self._write()

    def follows(self, follows: Next) -> None:
        """Note what follows from the attempt's end."""
        attempt = self._told["attempts"][-1]
        attempt |= {"quarantined": [key_of(device) for device in follows.quarantine], "again": follows.again}
        self._told["sentence"] = follows.why
        self._write()

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
        self._write()

    def closes(self, state: str, sentence: str, code: int) -> None:
        """Note how it all ended; ``state``: a word of `bitwitness.store.life`."""
        self._told |= {"state": state, "ended": now(), "ended_by": sentence, "sentence": sentence, "exit_code": code}
        self._write()

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return self._told

    @property
    def attempts(self) -> Sequence[dict[str, Any]]:
        """What was noted of each attempt."""
        found: list[dict[str, Any]] = self._told["attempts"]
        return found

    def _write(self) -> None:
        write_text(self.path, json.dumps(self._told, indent=1) + "\n", mode=0o600)
