"""What is new in run folders while their jobs write: events and series, a piece at each asking."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.finding import to_jsonable
from bitwitness.report.series import buckets
from bitwitness.store.monitored import monitored_ranks, read_series
from bitwitness.store.reader import ranks_there, read_events

KEPT = 5_000
"""Events that a view holds; of more, those that were seen first are left out."""
_LONGEST = 600
_POINTS = 2_000
_SHOWN = ("loss", "grad_norm")
Status = Callable[[str], dict[str, Any]]
"""What answers whether a run is healthy, as ``bitwitness status --json`` does."""


class Live:
    """The events and series of runs as they grow.

    Parameters
    ----------
    runs
        Their folders.
    status
        Answers for one of them.

    """

    def __init__(self, runs: Sequence[Path], status: Status) -> None:
        self.runs = list(runs)
        self._status = status
        self._events: list[dict[str, Any]] = []
        self._dropped = 0
        self._read: dict[Path, int] = {}
        self._sizes: dict[Path, int] = {}
        self._answers: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._series: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._lock = Lock()

    def news(self, after: int) -> dict[str, Any]:
        """Return the events after so many, and the runs' answers and series as they are now.

        ``next`` is what to ask with next time.
        """
        with self._lock:
            for number, run in enumerate(self.runs):
                self._look(number, run)
            start = max(0, after - self._dropped)
            return {
                "next": self._dropped + len(self._events),
                "events": self._events[start:],
                "runs": [self._told(run) for run in self.runs],
            }

    def _look(self, number: int, run: Path) -> None:
        """Read what has grown since the last time."""
        for rank in ranks_there(run):
            file = run / f"rank{rank:05d}" / "events.jsonl"
            size = _size(file)
            if size is None or self._sizes.get(file) == size:
                continue
            self._sizes[file] = size
            try:
                events, _ = read_events(file)
            except (UsageError, OSError):  # told by the run's answer
                continue
            seen = self._read.get(file, 0)
            self._read[file] = len(events)
            self._events += [_event(number, rank, event) for event in events[seen:]]
        if (over := len(self._events) - KEPT) > 0:
            del self._events[:over]
            self._dropped += over

    def _told(self, run: Path) -> dict[str, Any]:
        signature = _signature(run)
        if run not in self._answers or self._answers[run][0] != signature:
            self._answers[run] = (signature, self._answer(run))
        return {"name": shown(run.name or str(run), 200), **self._answers[run][1], "series": self._lines(run)}

    def _answer(self, run: Path) -> dict[str, Any]:
        try:
            told = self._status(str(run))
        except (UsageError, OSError) as error:
            return {"status": "unread", "sentence": shown(error, _LONGEST), "state": "unknown"}
        return {key: shown(told.get(key) or "", _LONGEST) for key in ("status", "sentence", "state", "to_do")}

    def _lines(self, run: Path) -> dict[str, list[list[float | None]]]:
        """Return the run's loss and gradient norm by step, of the first rank that has them."""
        files = tuple(sorted((str(file), _size(file)) for file in run.glob("rank[0-9]*/monitor-*.parquet")))
        if run not in self._series or self._series[run][0] != files:
            self._series[run] = (files, _series(run))
        return self._series[run][1]


def _series(run: Path) -> dict[str, list[list[float | None]]]:
    found: dict[str, list[list[float | None]]] = {}
    for rank in monitored_ranks(run)[:1]:
        table, _ = read_series(run, rank, kinds=["training"], columns=["step", "kind", "metric", "value"])
        rows = zip(*(table.column(name).to_pylist() for name in ("step", "metric", "value")), strict=True)
        for step, metric, value in rows:
            if metric in _SHOWN and step is not None:
                number = value if value is not None and math.isfinite(value) else None
                found.setdefault(metric, []).append([step, number])
    return {metric: _thinned(points) for metric, points in found.items()}


def _thinned(points: list[list[float | None]]) -> list[list[float | None]]:
    """Return as many points as fit a page, the least and the largest of each stretch among them, every gap and the last."""
    values = np.array([np.nan if value is None else value for _, value in points], dtype=np.float64)
    kept, _ = buckets(np.arange(len(points)), values, _POINTS // 2)
    gaps = np.flatnonzero(np.isnan(values))
    return [points[place] for place in sorted({*kept.tolist(), *gaps.tolist(), len(points) - 1})]


def _event(run: int, rank: int, event: dict[str, Any]) -> dict[str, Any]:
    keys = ("type", "time", "step", "sensor", "site", "severity", "message", "cause", "action")
    told = {key: event[key] for key in keys if isinstance(event.get(key), str | int | float)}
    texts = {key: shown(value, _LONGEST) if isinstance(value, str) else value for key, value in told.items()}
    return {**dict(to_jsonable(texts)), "run": run, "rank": rank}


def _signature(run: Path) -> tuple[Any, ...]:
    """Return what changes whenever a run folder grows."""
    names = ("run.json", "events.jsonl", "rank*/events.jsonl", "rank*/*.parquet")
    return tuple(sorted((str(file), _size(file)) for name in names for file in run.glob(name)))


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None
