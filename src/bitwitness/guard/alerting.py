"""Has a fleet told of a guard: its numbers as they are asked for, and each verdict once, by the rank that it is about."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from bitwitness.config import AlertsConfig
from bitwitness.device import this_device
from bitwitness.finding import Event, Note, Verdict
from bitwitness.guard.guardwatch import GuardWatch
from bitwitness.respond.alerts.events import verdict_event
from bitwitness.respond.alerts.exposure import Key
from bitwitness.respond.alerts.metrics import Labels, Numbers, Row
from bitwitness.respond.alerts.outlet import Outlet, join
from bitwitness.store.warned import Clearances


class Alerting:
    """Tells of one guard until it is closed.

    Parameters
    ----------
    config
        Who is told.
    watch
        The guard's.
    run
        The run folder; None where nothing is recorded.

    """

    def __init__(self, config: AlertsConfig, watch: GuardWatch, run: Path | None) -> None:
        self._watch, self._ranks = watch, watch.ranks
        self._run = "" if run is None else str(run)
        self._clearances = Clearances(run)
        root = watch.reader.root
        self._device = this_device(root.device)
        self._now = root.now
        self._began = self._now()
        self._told: Counter[str] = Counter()
        self._warnings = 0
        self._lost = 0
        reporter = watch.reporter
        key = Key(self._run or f"{os.getpid()}.{id(self)}", self._ranks.in_job)
        local = os.environ.get("LOCAL_RANK", "")
        local_rank = int(local) if local.isdecimal() and len(local) < 6 else 0
        self._outlet, self._leave = join(config, local_rank, key, self.numbers, reporter.aside)
        reporter.also = self.heard

    def heard(self, event: Event) -> None:
        """Hear of an event that is recorded; in the training's thread."""
        if isinstance(event, Verdict):
            self._verdict(event)
        elif isinstance(event, Note) and event.sensor == "ranks":
            self._lost = max(self._lost, len(event.evidence.get("absent") or ()))

    def _verdict(self, verdict: Verdict) -> None:
        accused = self._ranks.in_job in verdict.ranks
        if not accused and (verdict.ranks or self._ranks.rank != 0):
            return  # another rank tells of it
        self._told[str(verdict.cause)] += 1
        self._warnings += accused and verdict.fault_code is not None
        event = verdict_event(verdict, self._ranks.in_job, self._device if accused else None, self._run)
        self._outlet.put(event)

    def numbers(self, told: Outlet) -> Row:
        """Return this rank's numbers; in whatever thread asks, which may be before this object is whole."""
        watch, device = self._watch, self._device
        investigation = watch.investigation
        taken = self._now() - self._began
        labels = Labels(self._run, watch.reporter.model, str(self._ranks.in_job), device.host, device.uuid)
        return labels, Numbers(
            steps=watch.steps_judged,
            deep=watch.deep.taken,
            suspicions=investigation.suspicions,
            dismissed=investigation.dismissed,
            verdicts=dict(self._told),
            warning=self._warns,
            cost=watch.own_seconds / taken if taken > 0 else None,
            covered=self._covered(),
            step_ended=watch.last_ended,
            step_seconds=watch.last_took,
            lost=self._lost,
            undelivered=told.undelivered,
        )

    def _covered(self) -> dict[str, float]:
        """Return what shares are looked at; the training may be changing what is counted, and then it is not known."""
        shares = {}
        with suppress(RuntimeError, ZeroDivisionError):
            root = self._watch.reader.root
            everything = {id(p) for p in (*root.root.parameters(), *root.parameters.values())}
            shares["parameters"] = min(len(self._watch.sensors.ever), len(everything)) / len(everything)
        checksum = self._watch.operators.checksum
        with suppress(RuntimeError):
            if checksum is not None and (seen := checksum.coverage())["flops_seen"]:
                shares["flops"] = float(seen["share_checked"])
        return shares

    def close(self) -> None:
        """Tell no more, once what is under way was taken or took too long.

        The text file stays where it has a Warning or a lost rank in it, until that is cleared.
        """
        if not self._watch.inherited:
            self._watch.reporter.also = None
            self._leave(self._warns or self._lost > 0)

    @property
    def _warns(self) -> bool:
        return self._warnings > self._clearances.of(self._ranks.in_job)
