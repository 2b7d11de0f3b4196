"""Two recordings compared for a report: the comparison itself, and of its steps what a reader looks at."""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.measuring.values import KeptValues
from bitwitness.comparison.recordings import compare
from bitwitness.comparison.report import Report
from bitwitness.comparison.table import rows_of
from bitwitness.report.clean import name, number
from bitwitness.report.graph import Graph, graph_around
from bitwitness.report.heatmap import HeatMap, map_of_changes
from bitwitness.report.tree import level_of_change

_ROWS = 3000  # of the table: those that differ first
_HELD = 3  # steps whose graph is at hand when the first wrong operator is known: the first that differ
COLUMNS = ("step", "rank", "site", "result", "change", "max_abs_error", "l2_a", "l2_b", "hash_a", "hash_b")
_WORST = {"differs": 0, "only in A": 1, "only in B": 1, "group in A": 2, "group in B": 2, "rounding": 3, "equal": 4}


@dataclass(slots=True)
class Compared:
    """What came of it; ``levels``: of each module how far its results are apart, for the tree."""

    report: Report
    rows: list[list[str]]
    total: int
    levels: dict[str, tuple[int, str]]
    graph: Graph
    heat: HeatMap
    columns: tuple[str, ...] = COLUMNS


@dataclass(slots=True)
class _Watching:
    """Takes each compared step, and keeps no more than it will show."""

    total: int = 0
    levels: dict[str, tuple[int, str]] = field(default_factory=dict)
    changes: dict[int, dict[tuple[str, int], float]] = field(default_factory=dict)
    held: dict[tuple[int, int], Differences] = field(default_factory=dict)
    best: list[tuple[tuple[int, int], list[str]]] = field(default_factory=list)

    def __call__(self, rank: int, step: int, differences: Differences, values: KeptValues | None) -> None:
        """Take one step of one rank."""
        parted = differences.real or differences.alignment.only_a or differences.alignment.only_b
        if parted and len(self.held) < _HELD:
            self.held[rank, step] = differences
        for cells in rows_of(rank, step, differences, values):
            self.total += 1
            self._level(cells)
            place = -_WORST.get(str(cells["result"]), 4), -self.total
            entry = place, cells
            if len(self.best) < _ROWS:
                heapq.heappush(self.best, (place, _shown(cells)))
            elif place > self.best[0][0]:
                heapq.heapreplace(self.best, (entry[0], _shown(cells)))

    def _level(self, cells: dict[str, Any]) -> None:
        module = str(cells["site"]).partition("/")[0]
        if "change" not in cells:
            level, change = 2, math.inf
            said = f"{cells['result']}, step {cells['step']}"
        else:
            differs = cells["result"] == "differs"
            change = float(cells["change"])
            level = level_of_change(change, differs=differs)
            said = (
                f"relative change {cells['change']:.3g}, step {cells['step']}, rank {cells['rank']}"
                if level
                else "equal"
            )
        known, place = self.changes.setdefault(cells["rank"], {}), (module, cells["step"])
        known[place] = max(change, known.get(place, 0.0))
        if level > self.levels.get(module, (-1, ""))[0]:
            self.levels[module] = level, said


def compared(a: str | os.PathLike[str], b: str | os.PathLike[str], progress: Callable[[int, int], None]) -> Compared:
    """Compare two recordings; raises `UsageError` as `bitwitness.comparison.recordings.compare` does."""
    watching = _Watching()
    report = compare(a, b, sinks=[watching], progress=progress)
    first = report.first
    differences = None if first is None else watching.held.get((first.rank, first.step))
    graph = Graph() if first is None or differences is None else graph_around(first, differences)
    rows = [row for _, row in sorted(watching.best, key=lambda entry: entry[0], reverse=True)]
    return Compared(report, rows, watching.total, watching.levels, graph, map_of_changes(watching.changes))


def _shown(cells: dict[str, Any]) -> list[str]:
    told = []
    for column in COLUMNS:
        value = cells.get(column)
        told.append("" if value is None else number(value) if isinstance(value, float) else name(value))
    return told
