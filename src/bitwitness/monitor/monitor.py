"""`bw.Monitor`: follows the numbers of one model's training while entered."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.errors import UsageError
from bitwitness.finding import Finding
from bitwitness.monitor.monitoring import ModelMonitoring
from bitwitness.monitor.outlet import Sink
from bitwitness.session.session import Session
from bitwitness.session.writing import Writing
from bitwitness.store.monitored import is_monitored
from bitwitness.tap.modules import ROOT


class Monitor(Writing[ModelMonitoring]):
    """Follows what a training's numbers do, step by step, and says what is unusual in them.

    Parameters
    ----------
    model
        The module that the training calls; wrapped by DistributedDataParallel or ``torch.compile`` if it is there.
    out
        The run folder; where it holds a run already, this one goes beside it (``RUN-2``).
    config
        What to look at; or give its fields as keywords.
    sinks
        Callables that take each step's numbers, too: ``(metrics: dict[str, float], step: int)``.

    Raises
    ------
    UsageError
        If ``model`` is no module, or a sink cannot be called.
    ConfigError
        For settings that are not understood.

    """

    role = "monitor"

    def __init__(
        self,
        model: nn.Module,
        *,
        out: str | os.PathLike[str] = "monitor",
        config: MonitorConfig | None = None,
        sinks: Sequence[Sink] = (),
        **settings: Any,
    ) -> None:
        super().__init__(model, out)
        self.config = self._configured(MonitorConfig, config, settings)
        for sink in sinks:
            if not callable(sink):
                raise UsageError(f"Monitor: sinks: expected callables of (metrics, step), not {type(sink).__name__}")
        self._sinks = tuple(sinks)

    def _begin(self, session: Session) -> None:
        ranks, run = self._open(session)
        root = session.root
        run.describe(monitor=asdict(self.config), model=type(root).__name__, environment=self._environment(root))
        if self.config.print_struct and self.is_first_rank:
            self._print_struct(root)
        if self.config.wants_rank(run.rank):
            self._writer = ModelMonitoring(session, self.config, run, ranks, self._sinks)
            self._join(session, self._writer)

    def _print_struct(self, root: nn.Module) -> None:
        """Print what can be selected."""
        lines = [
            f"{'*' if self.config.wants_module(name or ROOT) else ' '} {name or ROOT}: {type(module).__name__}"
            for name, module in root.named_modules()
        ]
        sys.stderr.write("bitwitness: modules (*: looked at)\n" + "\n".join(lines) + "\n")

    @property
    def findings(self) -> list[Finding]:
        """What the rules have said of the steps that have ended; at most the newest 10,000."""
        return [] if self._writer is None else self._writer.findings()

    @property
    def series_steps(self) -> int:
        """How many numbers of series were held against the rules so far: steps times series."""
        return 0 if self._writer is None else self._writer.series_steps

    @property
    def is_empty(self) -> bool:
        """Whether no rank has written a row as yet."""
        return self.folder is None or not is_monitored(Path(self.folder))
