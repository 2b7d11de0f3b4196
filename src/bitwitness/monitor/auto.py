"""Monitoring a script that knows nothing of us: the models that it runs are found as it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from torch import nn

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.errors import BitwitnessError
from bitwitness.monitor.monitor import Monitor
from bitwitness.monitor.monitoring import ModelMonitoring
from bitwitness.monitor.outlet import Sink
from bitwitness.ranks.process_groups import wrappers_noticed
from bitwitness.session.reporter import Reporter
from bitwitness.session.roots import root_of
from bitwitness.session.search import ModelSearch
from bitwitness.session.session import sessions
from bitwitness.tap.modules import in_backward, keywords_of_call, unwrap


class AutoMonitor(ModelSearch[Monitor]):
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

    def __init__(self, config: MonitorConfig, out: str, sinks: Sequence[Sink] = ()) -> None:
        super().__init__()
        self._config = config
        self._out = out
        self._sinks = tuple(sinks)
        self._reporter = Reporter(None, int(os.environ.get("RANK", "0")))
        self.monitors: list[Monitor] = []

    def __enter__(self) -> Self:
        self._stack.enter_context(wrappers_noticed(self._wrapped))
        self._begin_search()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.end()
        for monitor in reversed(self.entered):
            monitor.__exit__(kind, error, trace)
        self._stack.close()

    @property
    def incomplete(self) -> bool:
        """Whether something that was asked for was not looked at."""
        return not self.monitors or any(one.problem or one.is_empty for one in self.monitors)

    @property
    def folders(self) -> list[str]:
        """Where the series are."""
        return [str(one.folder) for one in self.monitors]

    @property
    def alerts(self) -> int:
        """How often the rules of this rank have spoken."""
        return sum(len(one.findings) for one in self.monitors)

    def say(self, *, quiet: bool = False) -> None:
        """Print where the series are and how many alerts there were, or that there is nothing; if ``quiet``, what is wrong."""
        if not self.monitors:
            sys.stderr.write("bitwitness: nothing was monitored: no module with parameters was called\n")
            return
        for one in self.monitors:
            if not one.is_first_rank:
                continue
            found = len(one.findings)
            if one.is_empty:
                sys.stderr.write(f"bitwitness: {one.folder} holds no series: no step that was asked for ended\n")
            elif not quiet or found or one.problem:
                how = f", NOT ALL of it: {one.problem}" if one.problem else ""
                told = f"{found} alerts" if found else "no alerts"
                sys.stderr.write(f"bitwitness: monitored in {one.folder}: {told} on this rank{how}\n")

    # -- the search ----------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        self._reporter.failure("search for models", error, 0)

    def _watched_already(self) -> list[nn.Module]:
        return [one.root for one in sessions() if any(isinstance(other, ModelMonitoring) for other in one.instruments)]

    def _consider(self, module: nn.Module, args: Any) -> None:
        if module in self._passed or in_backward():
            return
        first = next(unwrap(module).parameters(), None)
        if first is None or first.is_meta:  # the latter holds no numbers
            self._passed.update(module.modules())
        elif root_of(module) is not None and self._take_over(module, module):  # else it comes back as, or in, a model
            self._passed.update(module.modules())
            self._monitor(module, args)

    def _monitor(self, module: nn.Module, args: Any) -> None:
        monitor = Monitor(module, out=self._out, config=self._config, sinks=self._sinks)
        try:
            monitor.start()
        except BitwitnessError as error:
            self._reporter.say(f"{type(unwrap(module)).__name__} is not monitored: {error}")
            return
        self.entered.append(monitor)
        self.monitors.append(monitor)
        monitor.join(module, args, keywords_of_call() or {})

    def _left(self, one: Monitor) -> None:
        if not one.let_go():
            self.monitors.remove(one)
