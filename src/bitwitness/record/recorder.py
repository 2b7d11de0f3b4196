"""`bw.Recorder`: records one model's training while entered."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from bitwitness.config.recording import RecordConfig
from bitwitness.errors import UsageError
from bitwitness.record.recording import ModelRecording
from bitwitness.session.entered import Entered
from bitwitness.session.session import Session
from bitwitness.store import RunWriter
from bitwitness.store.environment import describe
from bitwitness.store.run import is_recording

_DEADLINE_S = 60.0  # for the ranks to agree on a folder; they come here together


class Recorder(Entered):
    """Records what a model computes, step by step, into a run folder.

    Parameters
    ----------
    model
        The module that the training calls; wrapped by DistributedDataParallel or ``torch.compile`` if it is there.
    out
        The run folder; where it holds a run already, the recording goes beside it (``RUN-2``).
    config
        What to record; or give its fields as keywords.

    Raises
    ------
    UsageError
        If the model has no modules that can be hooked.
    ConfigError
        For settings that are not understood.

    """

    def __init__(
        self,
        model: nn.Module,
        *,
        out: str | os.PathLike[str] = "recording",
        config: RecordConfig | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model)
        if config is not None and settings:
            raise UsageError(f"give either config or its fields as keywords, not both ({', '.join(settings)})")
        try:
            self.config = config or RecordConfig(**settings)
        except TypeError as error:
            known = ", ".join(RecordConfig.__dataclass_fields__)
            raise UsageError(f"Recorder: {error}; the settings are {known}") from error
        self.folder: str | None = None
        self.is_first_rank = True
        """Whether this process speaks for all ranks."""
        self._out = os.fspath(out)
        self._recording: ModelRecording | None = None
        self._run: RunWriter | None = None

    def _begin(self, session: Session) -> None:
        self._stack.callback(self._tell_if_empty, session)  # the first of these to be there is the last to be called
        ranks = session.run.ranks(_DEADLINE_S)
        self._run = run = session.run.folder(self._out, "recording", _DEADLINE_S)
        self._stack.callback(session.run.leave, run, "recording")
        # Ranks that train each by itself have numbers of their own in one folder.
        rank = run.rank
        self.folder, self.is_first_rank = str(run.path), ranks.rank == 0 and run.keeps_run
        root = session.root
        run.describe(recording=asdict(self.config), model=type(root).__name__, environment=describe(root))
        if self.config.wants_rank(rank):
            self._recording = ModelRecording(session, self.config, run, rank)
            self._join(session, self._recording)
            if not self.config.recording:
                self.pause()

    @property
    def problem(self) -> str | None:
        """What kept something from being recorded; None if all was."""
        unwritten = None if self._run is None else self._run.problem
        return unwritten or (None if self._recording is None else self._recording.problem)

    def _tell_if_empty(self, session: Session) -> None:
        if self.is_empty and self.is_first_rank and self._recording is not None:
            asked = "" if self.config.steps is None else f" (steps = {self.config.steps!r})"
            sys.stderr.write(
                f"bitwitness: {self.folder} holds no rows: no step that was asked for{asked} ended; "
                f"{session.clock.ended} steps of the training did, and evaluations beside a training are part of none"
                f"{f'; {self.problem}' if self.problem else ''}\n"
            )

    @property
    def is_empty(self) -> bool:
        """Whether no rank has written a row as yet."""
        return self.folder is None or not is_recording(Path(self.folder))

    def let_go(self) -> bool:
        """Leave the model to another recorder; what was recorded is deleted if it is of no whole step."""
        if self._recording is None or self.session.clock.ended:
            self.close()
            return True
        self._recording.drop()
        self._recording = None
        if self._run is not None:
            self.session.run.leave(self._run, "recording", unused=True)
        self._stack.close()
        return False

    def _last_words(self) -> None:
        if self._recording is not None:
            self._recording.finish()  # no more is taken: the training goes on until the process ends
        super()._last_words()

    def flush(self) -> None:
        """Write what was recorded of the steps that have ended; return when it is on disk."""
        if self._recording is not None:
            self._recording.flush()

    def step(self) -> None:
        """Say that a step ended, where no optimizer tells it (inference)."""
        if self._recording is not None:
            self._recording.close_step()
        self.session.clock.end_step()

    def join(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of the model that has just begun, whose pre-hooks torch had already listed when ours was made."""
        self.session.join_call(module, args, kwargs)
