"""Writes one rank's part of a run folder. Never fails into the training: what cannot be recorded is said and counted.

    RUN/run.json                    what ran: configuration, versions, ranks, devices, the last verdict
    RUN/events.jsonl                verdicts and notes that concern all ranks (kept by the lowest living rank)
    RUN/rank00000/events.jsonl      this rank's own findings, verdicts and notes
    RUN/rank00000/tensors/          what an operator read and wrote when it was found to be an origin of NaN or Inf

What is created is its owner's alone (folders 0700, files 0600); a folder that was there before keeps its permissions.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bitwitness.finding import Event, Verdict, to_jsonable
from bitwitness.store.claim import SCHEMA, make_folder, open_private
from bitwitness.store.life import BEAT_S, beginning, now
from bitwitness.store.redact import redacted
from bitwitness.store.seal import NUMBER, sealed
from bitwitness.store.tensorfile import ENTRY_BYTES, TensorFile

_SHARED = "events.jsonl"
_FILES_KEPT = 20  # pieces of evidence with tensors: a device that fails at every step must not fill the disk


class RunWriter:
    """One rank's writer. No method raises for a folder that cannot be written: it is said once and tried again.

    Parameters
    ----------
    path
        The run folder. See `claim_folder` for how ranks agree on one that is not taken.
    rank, world_size
        Who writes; how many ranks train together, None where each trains by itself.
    keeps_run
        Whether this rank keeps ``run.json``: the lowest does by default.

    Attributes
    ----------
    dropped
        How many events could not be recorded so far.
    problem
        Why something could not be written, the latest of it; None if all was.

    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int, world_size: int | None, *, keeps_run: bool | None = None
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self.world_size = world_size
        self.keeps_run = rank == 0 if keeps_run is None else keeps_run
        self.dropped = 0
        self._own = f"rank{rank:05d}"
        self._keeps_shared = rank == 0 or world_size is None  # ranks by themselves write a verdict of their own each
        self._fields: dict[str, Any] = {
            "schema": SCHEMA,
            "world_size": world_size,
            "command": redacted(sys.argv),
            "started": now(),
            **beginning(),
            "versions": {"python": platform.python_version(), **_versions()},
        }
        self._kept = 0
        self._one_at_a_time = threading.Lock()  # SIGTERM's last words come from a thread of their own
        self._final = False
        self._beaten = time.monotonic()
        self.problem: str | None = None
        self._torn: set[str] = set()
        self._written: dict[str, int] = {}
        try:
            self._make_folders()
        except OSError as error:
            self._fail(error)

    def event(self, event: Event) -> None:
        """Append to this rank's events, at once."""
        self._append(f"{self._own}/events.jsonl", event)

    def shared_event(self, event: Event) -> None:
        """Append to the file of all ranks, where this rank keeps it; ``run.json`` shows the last verdict."""
        if not self._keeps_shared:
            return
        self._append(_SHARED, event)
        if isinstance(event, Verdict):
            self.describe(verdict=event.to_event())

    def take_over(self, missing: Collection[int]) -> None:
        """Keep the file of all ranks from here on, if every rank below this one is ``missing``."""
        self._keeps_shared = self._keeps_shared or set(range(self.rank)) <= set(missing)

    def tensors(self, step: int, tensors: Mapping[str, Any]) -> str | None:
        """Keep tensors in a safetensors file of their own; return its name in this folder, or None if that failed."""
        if self._kept >= _FILES_KEPT:
            return None
        self._kept += 1
        name = f"{self._own}/tensors/evidence-step{step:08d}-{self._kept:06d}.safetensors"
        reserve = sum(ENTRY_BYTES + len(json.dumps(key)) for key in tensors) + 64
        file: TensorFile | None = None
        try:
            make_folder(self.path / self._own / "tensors")
            file = TensorFile(self.path / name, reserve)
            for key, tensor in tensors.items():
                file.add(key, tensor.detach().cpu().contiguous())
            file.close()
        except OSError as error:
            if file is not None:
                file.abandon()
            self._fail(error)
            return None
        return name

    def describe(self, **fields: Any) -> None:
        """Set fields of ``run.json`` and rewrite it, whole or not at all; by the rank that keeps it."""
        with self._one_at_a_time:
            if self.keeps_run and not self._final:
                self._fields |= to_jsonable(fields)
                self._rewrite()

    def _rewrite(self) -> None:
        temporary = self.path / "run.json.part"
        try:
            with open_private(temporary, "w") as file:
                file.write(json.dumps(sealed(self._fields), indent=1, allow_nan=False) + "\n")
            temporary.replace(self.path / "run.json")
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self._fail(error)

    def beat(self, steps: int) -> None:
        """Leave a sign of life, now and then; ``steps``: how many have ended."""
        if self.keeps_run and time.monotonic() - self._beaten >= BEAT_S:
            self._beaten = time.monotonic()
            self.describe(steps=steps, seen=now())

    def ended(self, state: str, by: str, steps: int, *, final: bool = False) -> None:
        """Say how the run ended; see `bitwitness.store.life`. After what is ``final``, ``run.json`` is left alone."""
        self.describe(state=state, ended_by=by, steps=steps, ended=now(), seen=now(), not_recorded=self.dropped)
        self._final = final

    def close(self) -> None:
        """Say what was not recorded."""
        if self.dropped:
            _say(f"rank {self.rank}: {self.dropped} events were not recorded in {self.path}: {self.problem}")

    def _append(self, name: str, event: Event) -> None:
        with self._one_at_a_time:
            number = self._written.get(name, 0) + 1
            # Ranks that train each by itself share one file, in which nobody's numbers would be in order.
            place = {} if name == _SHARED and self.world_size is None else {NUMBER: number}
            line = json.dumps(sealed({"time": now(), **place, **event.to_event()}), allow_nan=False) + "\n"
            try:
                self._make_folders()
                # Opened anew each time: events are few, and a full disk shows at once and not when the file is closed.
                with open_private(self.path / name, "a") as file:
                    file.write("\n" + line if name in self._torn else line)
            except OSError as error:
                self._torn.add(name)  # it may end in half a line now
                self.dropped += 1
                self._fail(error)
            else:
                self._written[name] = number
                self._torn.discard(name)

    def _make_folders(self) -> None:
        make_folder(self.path)
        make_folder(self.path / self._own)

    def _fail(self, error: OSError) -> None:
        first = self.problem is None
        self.problem = f"{error.strerror or error} ({error.filename or self.path})"
        if first:
            _say(
                f"rank {self.rank}: cannot write to the run folder {self.path}: {self.problem}. The training goes on; "
                "what cannot be recorded is counted, and findings are printed. Free the space or give another --out"
            )


def _versions() -> dict[str, str]:
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "numpy", "transformers")}
    return {name: str(version) for name, version in found.items() if version is not None}


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(f"bitwitness: {text}\n")
        sys.stderr.flush()
