"""What a view shows: one recorded run, or two that were compared, step by step and rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.frame import Floats, StepFrame
from bitwitness.comparison.measuring.values import KeptValues
from bitwitness.comparison.recordings import compare
from bitwitness.comparison.report import Report
from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.finding import Finding
from bitwitness.store.folder import Run
from bitwitness.store.opening import open_source
from bitwitness.view.colours import State
from bitwitness.view.found import Found, Pairs, accuse, nonfinite, of_pairs, suspects_of
from bitwitness.view.graph import Graph, graph_of

KEPT_BYTES = 1 << 30
"""Of rows that the steps of a comparison may hold; beyond, a step is to be named (``--step``)."""
_DRAWN = 4
"""Places whose graphs are kept: whoever looks goes back and forth."""

Place = tuple[int, int]
"""A rank and a step."""


@dataclass(slots=True)
class Side:
    """One run's graph at a place, and what was found in it."""

    graph: Graph
    found: dict[str, Found]


@dataclass(slots=True)
class _Compared:
    a: pa.Table
    b: pa.Table
    factors: Floats | None
    pairs: Pairs
    of_a: dict[int, Found]
    of_b: dict[int, Found]


@dataclass(slots=True)
class Scene:
    """The places of one run or two, and each place's graphs.

    Attributes
    ----------
    names
        The runs, as their users name them.
    conclusion
        One sentence for all, where two were compared.
    places
        Ranks and steps that can be shown.

    """

    names: list[str]
    conclusion: str
    places: list[Place]
    _draw: Callable[[Place], list[Side]]
    first: Place | None = None
    """Where to begin: at the first suspect."""
    _drawn: dict[Place, list[Side]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def sides(self, place: Place) -> list[Side]:
        """Return the graphs of a place, of each run.

        Raises
        ------
        UsageError
            If there is no such place.

        """
        with self._lock:  # the server has a thread for each request
            if place not in self.places:
                raise UsageError(
                    f"nothing was recorded of rank {place[0]}, step {place[1]}; expected one of those listed"
                )
            if place not in self._drawn:
                self._drawn[place] = self._draw(place)
                while len(self._drawn) > _DRAWN:
                    del self._drawn[next(iter(self._drawn))]
            return self._drawn[place]

    def suspects(self, place: Place) -> list[dict[str, str]]:
        """Return the nodes of a place that made something, of each run once."""
        listed: dict[str, dict[str, str]] = {}
        for number, side in enumerate(self.sides(place)):
            for one in suspects_of(side.graph, side.found):
                listed.setdefault(one["id"], one | {"run": "AB"[number]})
        return list(listed.values())


def one_run(path: Path, *, step: int | None = None, rank: int | None = None) -> Scene:
    """Open a recorded run; NaN and Inf are what is found in it, and what its guard found.

    Raises
    ------
    UsageError
        If it has no recorded rows, or not of this step and rank.

    """
    source = open_source(path)
    places = [(which, number) for which in source.ranks() for number in source.steps(which)]
    chosen = _chosen(places, step, rank, path)
    named: dict[Place, list[tuple[str, str]]] = {}
    for event in Run(path).findings() if source.kind == "bitwitness" else []:
        if isinstance(event, Finding):
            named.setdefault((event.rank, event.step), []).append((_site(event), shown(event.message, 400)))

    def draw(place: Place) -> list[Side]:
        graph = graph_of(f"rank {place[0]}, step {place[1]}", StepFrame(source.table(*place)), source.stacks(place[0]))
        found = nonfinite(graph)
        accuse(found, graph, named.get(place, ()))
        return [Side(graph, found)]

    first = next((place for place in chosen if place in named), None)
    return Scene([_name(path)], "", chosen, draw, first)


def two_runs(
    a: Path,
    b: Path,
    *,
    step: int | None = None,
    rank: int | None = None,
    modules: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Scene:
    """Compare two runs; what differs is found in them, and who made it.

    Raises
    ------
    UsageError
        If they cannot be compared, or hold more than can be shown at once.

    """
    kept: dict[Place, _Compared] = {}

    def sink(which: int, number: int, differences: Differences, _values: KeptValues | None) -> None:
        pairs, of_a, of_b = of_pairs(differences)
        a_rows, b_rows = differences.a.table, differences.b.table
        kept[which, number] = _Compared(a_rows, b_rows, differences.b.factors, pairs, of_a, of_b)
        if sum(one.a.nbytes + one.b.nbytes for one in kept.values()) > KEPT_BYTES and len(kept) > 1:
            raise UsageError(
                f"view: the rows of the {len(kept)} steps up to step {number} of rank {which} take more than "
                f"{KEPT_BYTES >> 30} GiB; name a step, and with many ranks a rank (--step {number} --rank {which})"
            )

    report = compare(a, b, modules=modules, ranks=rank, steps=step, sinks=[sink], progress=progress)
    _mark(report, kept)
    stacks = {side: open_source(path).stacks for side, path in (("a", a), ("b", b))}

    def draw(place: Place) -> list[Side]:
        one = kept[place]
        name = f"rank {place[0]}, step {place[1]}"
        first = graph_of(f"A, {name}", StepFrame(one.a), _stacks(stacks["a"], place[0]))
        twins = {node.number: node for node in first.nodes}
        like = {number_b: twins[number_a] for number_a, number_b in one.pairs}
        frame = StepFrame(one.b, one.factors)
        second = graph_of(f"B, {name}", frame, _stacks(stacks["b"], place[0]), like=like, used=twins.values())
        return [_side(first, one.of_a), _side(second, one.of_b)]

    places = sorted(kept)
    if not places:
        raise UsageError(f"view: nothing of {shown(a)} and {shown(b)} could be compared: {report.conclusion}")
    first = None if report.first is None else (report.first.rank, report.first.step)
    return Scene([_name(a), _name(b)], report.conclusion, places, draw, first if first in kept else None)


def _mark(report: Report, kept: Mapping[Place, _Compared]) -> None:
    """Mark the suspects of a comparison among what was found, in both runs where both have the operator."""
    for suspect in report.suspects:
        one = kept.get((suspect.rank, suspect.step))
        if one is None:
            continue
        text = f"{suspect.text}" + (f" (called at {suspect.line})" if suspect.line else "")
        sides = []
        if suspect.pair is not None:
            sides += [(one.of_a, suspect.pair.a.number), (one.of_b, suspect.pair.b.number)]
        if suspect.lone is not None:
            sides.append((one.of_b if suspect.side == "b" else one.of_a, suspect.lone.number))
        for found, number in sides:
            if number in found:
                found[number].state, found[number].text = State.MADE_HERE, shown(text, 1_000)


def _side(graph: Graph, found: Mapping[int, Found]) -> Side:
    return Side(graph, {node.id: found[node.number] for node in graph.nodes if node.number in found})


def _chosen(places: list[Place], step: int | None, rank: int | None, path: Path) -> list[Place]:
    chosen = [place for place in places if rank in (None, place[0]) and step in (None, place[1])]
    if not chosen:
        seen = f"ranks {sorted({one[0] for one in places})[:8]}, steps {sorted({one[1] for one in places})[:8]}"
        what = " ".join(f"--{name} {value}" for name, value in (("step", step), ("rank", rank)) if value is not None)
        raise UsageError(f"view: {shown(path)} has nothing of {what or 'any step'}; it has {seen}")
    return chosen


def _site(event: Finding) -> str:
    site = event.site
    return f"{site.module}/{site.op}#{site.call}:{site.phase}"


def _stacks(read: Callable[[int], dict[int, str]], rank: int) -> dict[int, str]:
    try:
        return read(rank)
    except (UsageError, KeyError):  # ranks that were put together have none of their own
        return {}


def _name(path: Path) -> str:
    return shown(path.name or str(path), 200)


def to_json(scene: Scene) -> dict[str, Any]:
    """Return what a page asks first: runs, places, where to begin."""
    return {
        "runs": scene.names,
        "conclusion": shown(scene.conclusion, 2_000),
        "places": [{"rank": rank, "step": step} for rank, step in scene.places],
        "first": scene.places.index(scene.first) if scene.first is not None else 0,
    }
