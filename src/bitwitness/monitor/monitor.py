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
from bitwitness.session.entered import Entered
from bitwitness.session.session import Session
from bitwitness.store import RunWriter
from bitwitness.store.environment import describe
from bitwitness.store.monitored import is_monitored
from bitwitness.tap.modules import ROOT

_DEADLINE_S = 60.0  # for the ranks to agree on a folder; they come here together


class Monitor(Entered):
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

    def __init__(
        self,
        model: nn.Module,
        *,
        out: str | os.PathLike[str] = "monitor",
        config: MonitorConfig | None = None,
        sinks: Sequence[Sink] = (),
        **settings: Any,
    ) -> None:
        super().__init__(model)
        if config is not None and settings:
            raise UsageError(f"give either config or its fields as keywords, not both ({', '.join(settings)})")
        try:
            self.config = config or MonitorConfig(**settings)
        except TypeError as error:
            known = ", ".join(MonitorConfig.__dataclass_fields__)
            raise UsageError(f"Monitor: {error}; the settings are {known}") from error
        for sink in sinks:
            if not callable(sink):
                raise UsageError(f"Monitor: sinks: expected callables of (metrics, step), not {type(sink).__name__}")
        self.folder: str | None = None
        self.is_first_rank = True
        """Whether this process speaks for all ranks."""
        self._sinks = tuple(sinks)
        self._out = os.fspath(out)
        self._monitoring: ModelMonitoring | None = None
        self._run: RunWriter | None = None

    def _begin(self, session: Session) -> None:
        ranks = session.run.ranks(_DEADLINE_S)
        self._run = run = session.run.folder(self._out, "monitor", _DEADLINE_S)
        self._stack.callback(session.run.leave, run, "monitor")
        rank = run.rank
        self.folder, self.is_first_rank = str(run.path), ranks.rank == 0 and run.keeps_run
        root = session.root
        run.describe(monitor=asdict(self.config), model=type(root).__name__, environment=describe(root))
        if self.config.print_struct and self.is_first_rank:
            self._print_struct(root)
        if self.config.wants_rank(rank):
            self._monitoring = ModelMonitoring(session, self.config, run, ranks, self._sinks)
            self._join(session, self._monitoring)

    def _print_struct(self, root: nn.Module) -> None:
        """Print what can be selected."""
        lines = [
            f"{'*' if self.config.wants_module(name or ROOT) else ' '} {name or ROOT}: {type(module).__name__}"
            for name, module in root.named_modules()
        ]
        sys.stderr.write("bitwitness: modules (*: looked at)\n" + "\n".join(lines) + "\n")

    @property
    def problem(self) -> str | None:
        """What kept something from being looked at; None if all was."""
        unwritten = None if self._run is None else self._run.problem
        return unwritten or (None if self._monitoring is None else self._monitoring.problem)

    @property
    def findings(self) -> list[Finding]:
        """What the rules have said of the steps that have ended; at most the newest 10,000."""
        return [] if self._monitoring is None else self._monitoring.findings()

    @property
    def series_steps(self) -> int:
        """How many numbers of series were held against the rules so far: steps times series."""
        return 0 if self._monitoring is None else self._monitoring.series_steps

    @property
    def is_empty(self) -> bool:
        """Whether no rank has written a row as yet."""
        return self.folder is None or not is_monitored(Path(self.folder))

    def let_go(self) -> bool:
        """Leave the model to another monitor; what was written is deleted if it is of no whole step."""
        if self._monitoring is None or self.session.clock.ended:
            self.close()
            return True
        self._monitoring.drop()
        self._monitoring = None
        if self._run is not None:
            self.session.run.leave(self._run, "monitor", unused=True)
        self._stack.close()
        return False

    def _last_words(self) -> None:
        if self._monitoring is not None:
            self._monitoring.finish()  # no more is taken: the training goes on until the process ends
        super()._last_words()

    def flush(self) -> None:
        """Write what was seen of the steps that have ended; return when it is on disk."""
        if self._monitoring is not None:
            self._monitoring.flush()

    def step(self) -> None:
        """Say that a step ended, where no optimizer tells it (inference)."""
        if self._monitoring is not None:
            self._monitoring.close_step()
        self.session.clock.end_step()

    def join(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a call of the model that has just begun, whose pre-hooks torch had already listed when ours was made."""
        self.session.join_call(module, args, kwargs)
