"""Where a step's numbers go, on a thread of its own: the series on disk, the rules, the sinks, the comparison of ranks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import pyarrow as pa

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.files.shown import shown_lines
from bitwitness.finding import Finding, Severity
from bitwitness.monitor.exchange import Exchange
from bitwitness.monitor.rules.rule import Peers
from bitwitness.monitor.series import SeriesKey, StepNumbers, Universe
from bitwitness.monitor.sheet import StepRows
from bitwitness.monitor.watch import Watch
from bitwitness.session.session import sessions
from bitwitness.store import RunWriter
from bitwitness.store.background import advice
from bitwitness.store.series import SeriesWriter
from bitwitness.tap.loaded import LoadedBatches

Sink = Callable[[Mapping[str, float], int], None]
"""Takes a step's numbers by name, and the step's number; called on the monitor's own thread."""
_FINDINGS_KEPT = 10_000
_SPEAKS = 50  # lines of alerts on stderr; all are recorded


class Outlet:
    """Takes steps, and sees to the rest.

    Parameters
    ----------
    run
        The run folder's writer.
    config
        What is looked at and watched.
    sinks
        Where numbers go, too.
    note
        Told what went wrong.
    exchange
        Waits for each step's numbers, where ranks are compared.

    """

    def __init__(
        self,
        run: RunWriter,
        config: MonitorConfig,
        sinks: Sequence[Sink],
        note: Callable[[str], None],
        exchange: Exchange | None,
    ) -> None:
        self._run = run
        self._config = config
        self._sinks = list(sinks)
        self._note = note
        self._exchange = exchange
        self._universe = Universe(run.rank)
        self._loaded = LoadedBatches()
        self._watch = Watch(config, self._found, self._loaded.indices) if config.watch else None
        if config.watch and "spike" in config.rules:
            self._loaded.attach()
        self._writing = SeriesWriter(run.path / f"rank{run.rank:05d}", self._ended)
        self._spoken = 0
        self.findings: deque[Finding] = deque(maxlen=_FINDINGS_KEPT)
        """What the rules said, the newest of it."""

    @property
    def looked_at(self) -> int:
        """How many numbers of series were held against the rules."""
        return 0 if self._watch is None else self._watch.looked_at

    @property
    def broken(self) -> bool:
        """Whether nothing is written any more."""
        return self._writing.broken is not None

    def step(self, read: Callable[[], StepRows]) -> None:
        """Take a step, whose numbers may still be on their way."""
        self._writing.step(partial(self._take, read))

    def compared(self, step: int, peers: Peers) -> None:
        """Take what a comparison of ranks gave."""
        if self._watch is not None:
            watch = self._watch
            self._writing.then(lambda: self._watched(lambda: watch.compare(step, self._run.rank, peers)))

    def flush(self) -> None:
        """Write everything; return when it is on disk."""
        self._writing.flush()

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._loaded.detach()
        self._writing.close()
        if self._watch is not None:
            self._run.describe(monitored={"series_steps": self._watch.looked_at, "alerts": self._watch.alerts})

    def delete(self) -> None:
        """End, and leave nothing."""
        self._loaded.detach()
        self._writing.delete()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _take(self, read: Callable[[], StepRows]) -> pa.Table:
        rows = with_norm(read())
        numbers = self._universe.numbers(rows)
        if self._exchange is not None:
            self._exchange.give(numbers)
        if self._watch is not None:
            watch = self._watch
            self._watched(lambda: watch.step(numbers))
        for sink in list(self._sinks):
            try:
                sink(metrics_in(numbers), rows.step)
            except Exception as error:  # a sink's server may be away; the training and the series go on
                self._sinks.remove(sink)
                self._note(f"a sink failed at step {rows.step} and gets no more: {type(error).__name__}: {error}")
        return self._universe.table(rows, self._config.digits)

    def _watched(self, look: Callable[[], object]) -> None:
        """Have the rules look; an error in them ends them, and not the series."""
        if self._watch is None:
            return
        try:
            look()
        except Exception as error:
            self._watch = None
            self._note(f"the watch rules failed and are off: {type(error).__name__}: {error}")

    def _found(self, finding: Finding) -> None:
        self._run.event(finding)
        if finding.severity is Severity.INFO:  # what follows from an alert
            return
        self.findings.append(finding)
        self._spoken += 1
        if self._spoken <= _SPEAKS:
            rule = finding.sensor.removeprefix("monitor.")
            more = " (no more are printed; all are in events.jsonl)" if self._spoken == _SPEAKS else ""
            with suppress(Exception):
                model = f", {self._run.path.name}" if len(sessions()) > 1 else ""  # which of several
                line = f"bitwitness [rank {finding.rank}{model}] step {finding.step}: {rule}: {finding.message}{more}"
                sys.stderr.write(f"{shown_lines(line)}\n")

    def _ended(self, problem: str) -> None:
        self._note(
            f"the series in {self._run.path} end: {problem}. The training goes on; what was written before, if anything was, "
            f"is readable. {advice(problem)}"
        )


def with_norm(rows: StepRows) -> StepRows:
    """Return a step's rows with the total gradient norm, where rows of gradients tell it."""
    places = [i for i, key in enumerate(rows.keys) if key.kind == rows.norm_of]
    if not places:
        return rows
    bad = rows.figures[places, :2].sum() > 0
    norm = float("nan") if bad else float(np.sqrt(np.sum(rows.figures[places, 6] ** 2)))
    return rows.with_value("training", ".", "grad_norm", norm)


def metrics_in(numbers: StepNumbers) -> dict[str, float]:
    """Return a step's numbers by name: ``training/loss``, ``grad/layers.0.weight/l2`` and so on."""
    found: dict[str, float] = {}
    for place in numbers.order.tolist():
        key: SeriesKey = numbers.keys[place]
        if key.metric is not None:
            name = f"training/{key.metric}" if key.kind == "training" and key.name == "." else str(key)
            found[name] = float(numbers.value[place])
        else:
            found[f"{key}/l2"] = float(numbers.l2[place])
    return found
