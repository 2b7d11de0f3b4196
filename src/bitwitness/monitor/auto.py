"""Monitoring a script that knows nothing of us: the models that it runs are found as it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.monitor import Monitor
from bitwitness.monitor.monitoring import ModelMonitoring
from bitwitness.monitor.outlet import Sink
from bitwitness.session.everymodel import EveryModel


class AutoMonitor(EveryModel[Monitor]):
    """Monitors every model with parameters that is called by no other module inside the ``with``.

    Parameters
    ----------
    config
        What to look at in each.
    out
        The first model's run folder; a second one's is called ``OUT-2``.
    sinks
        Where the numbers go, too; all models' to the same.

    """

    instrument, done = ModelMonitoring, "monitored"

    def __init__(self, config: MonitorConfig, out: str, sinks: Sequence[Sink] = ()) -> None:
        super().__init__()
        self._config = config
        self._out = out
        self._sinks = tuple(sinks)

    def _made_for(self, module: nn.Module) -> Monitor:
        return Monitor(module, out=self._out, config=self._config, sinks=self._sinks)

    def say(self, *, quiet: bool = False) -> None:
        """Print where the series are and how many alerts there were, or that there is nothing; if ``quiet``, what is wrong."""
        if not self.taken:
            sys.stderr.write("bitwitness: nothing was monitored: no module with parameters was called\n")
            return
        for one in self.taken:
            if not one.is_first_rank:
                continue
            found = sum(finding.sensor != "monitor.post_mortem" for finding in one.findings)
            if one.is_empty:
                why = one.problem or "no step that was asked for ended"
                sys.stderr.write(f"bitwitness: {one.folder} holds no series: {why}\n")
            elif not quiet or found or one.problem:
                how = f", NOT ALL of it: {one.problem}" if one.problem else ""
                told = f"{found} alert{'s' * (found > 1)}" if found else "no alerts"
                sys.stderr.write(f"bitwitness: monitored in {one.folder}: {told} on this rank{how}\n")
