"""`bw.Recorder`: records one model's training while entered."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from bitwitness.config.recording import RecordConfig
from bitwitness.record.recording import ModelRecording
from bitwitness.session.session import Session, sessions
from bitwitness.session.writing import Writing
from bitwitness.store.run import is_recording


class Recorder(Writing[ModelRecording]):
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

    role = "recording"

    def __init__(
        self,
        model: nn.Module,
        *,
        out: str | os.PathLike[str] = "recording",
        config: RecordConfig | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model, out)
        self.config = self._configured(RecordConfig, config, settings)

    def _begin(self, session: Session) -> None:
        self._stack.callback(self._tell_if_empty, session)  # the first of these to be there is the last to be called
        _, run = self._open(session)
        rank = run.rank  # ranks that train each by itself have numbers of their own in one folder
        root = session.root
        before = max((one.clock.ended for one in sessions() if one is not session), default=0)
        run.describe(
            recording=asdict(self.config),
            model=type(root).__name__,
            steps_before=before,
            environment=self._environment(root),
        )
        if self.config.wants_rank(rank):
            self._writer = ModelRecording(session, self.config, run, rank)
            self._join(session, self._writer)
            if not self.config.recording:
                self.pause()

    def _tell_if_empty(self, session: Session) -> None:
        if self.is_empty and self.is_first_rank and self._writer is not None:
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
