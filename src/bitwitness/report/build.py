"""Makes a report: reads what the runs left, tells their story, and gathers what the page draws."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bitwitness.errors import UnreadError, UsageError
from bitwitness.finding import Finding, Note, Verdict
from bitwitness.report.alerts import LEVELS as ALERT_LEVELS
from bitwitness.report.alerts import levels_of_alerts
from bitwitness.report.clean import name, text
from bitwitness.report.heatmap import HeatMap, HeatMapMaker
from bitwitness.report.numbers import Numbers
from bitwitness.report.series import MOST_BUCKETS, Line, lines_of
from bitwitness.report.story import RunStory, Story, badness, story_of, story_of_run, tell_broken
from bitwitness.report.tree import LEVELS, PAIR_LEVELS, levels_of_run, tree_of
from bitwitness.store.answer import Answer, answers
from bitwitness.store.folder import Run
from bitwitness.store.monitored import is_monitored
from bitwitness.store.opening import open_source
from bitwitness.store.watched import Watched

if TYPE_CHECKING:
    from bitwitness.report.pair import Compared

SCHEMA = 1
"""Of `Report.to_dict`; counted up when a field changes its meaning or goes."""
_MOST_RUNS = 16
_EVENTS = 3000  # rows of the table
_POINTS = 8000  # buckets of one number's lines, all ranks together
_LEAST_BUCKETS = 100
_DEVIATIONS = 10  # of monitored runs: the first of each kind and rank
_TO_DO_OF_PARTED = (
    "If the two were meant to be the same, look at where they part, below; 'bitwitness record' of both and "
    "'bitwitness compare' "
    "name the operator. If they were not, nothing has to be done."
)
_MARKS = 200  # events on the timeline
_SEVERITY = {"error": 0, "warning": 1, "info": 2}

Event = Verdict | Finding | Note


@dataclass(slots=True)
class Report:
    """A report, ready to be written in any form.

    Attributes
    ----------
    story
        What is said.
    charts
        What the page draws: ``timeline``, ``heat``, ``tree``, ``graph``, ``table``; each only where there is something.
    comparison
        Of two recordings: what ``bitwitness compare --json`` writes.
    beside
        Of two monitored runs: where their series part, a sentence first, and the first that deviate.

    """

    story: Story
    charts: dict[str, Any] = field(default_factory=dict)
    comparison: dict[str, Any] | None = None
    beside: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the machine's form: the conclusion first."""
        story = self.story
        return {
            "schema": SCHEMA,
            "kind": story.kind,
            "status": story.status,
            "headline": story.headline,
            "conclusion": story.conclusion,
            "to_do": story.to_do,
            "doubts": story.doubts,
            "runs": [run.to_dict() for run in story.runs],
            "comparison": self.comparison,
            "beside": self.beside,
        }


@dataclass(slots=True)
class _Read:
    """One run as it was read."""

    run: Run
    story: RunStory
    events: list[Event]
    lines: list[Line]
    heat: HeatMap
    watched: Watched | None


def build_report(
    runs: Sequence[str | os.PathLike[str]], progress: Callable[[int, int], None] = lambda _done, _all: None
) -> Report:
    """Make the report of one run, of several, or of a pair of recordings, which are compared.

    Parameters
    ----------
    runs
        Run folders; two that are recordings are compared, the second being the one to compare with.
    progress
        Told of (steps compared, steps in all).

    Raises
    ------
    UsageError
        If one of them cannot be read, or none was named.

    """
    if not 1 <= len(runs) <= _MOST_RUNS:
        raise UsageError(f"report: {len(runs)} runs were named; expected 1 to {_MOST_RUNS}")
    pair = len(runs) == 2 and all(_recorded(run) for run in runs)
    asked = [one for run in runs for one in _answers(run, foreign=pair)]
    read = [_read(answer, told, len(asked)) for answer, told in asked]
    if not pair:
        read.sort(key=lambda one: badness(one.story))
    found = _compared(runs[0], runs[1], progress) if pair else None
    report = Report(story_of([one.story for one in read], None if found is None else found.report))
    report.comparison = None if found is None else found.report.to_dict()
    if len(runs) == 2 and not pair and all(map(is_monitored, runs)):
        _put_beside(report, *runs)
    report.charts = _charts(read, found)
    return report


def _compared(a: str | os.PathLike[str], b: str | os.PathLike[str], progress: Callable[[int, int], None]) -> Compared:
    from bitwitness.report.pair import compared  # needs torch, which a report of one run does not

    return compared(a, b, progress)


def _put_beside(report: Report, a: str | os.PathLike[str], b: str | os.PathLike[str]) -> None:
    """Say where the series of two monitored runs part; first of all, where nothing else is to be said of them."""
    from bitwitness.monitor.compare import compare_monitored  # as above

    found = compare_monitored(a, b)
    shown = [
        f"rank {one.rank}, {one.kind} {one.name}: from step {one.step} on, by {one.change:+.1%} against B's, at most "
        f"{one.worst:.1%}"
        for one in found.first[:_DEVIATIONS]
    ]
    conclusion = f"A is {name(a)}, B is {name(b)}: {found.conclusion}"
    report.beside = [text(one) for one in (conclusion, *shown, *found.problems)]
    if found.status == "findings" and report.story.status == "fine":
        report.story.status, report.story.conclusion = "findings", text(found.conclusion)
        report.story.headline = (
            f"Nothing unusual was seen in either run, but they are not the same: {text(found.conclusion)}."
        )
        report.story.to_do = [_TO_DO_OF_PARTED]


def _recorded(run: str | os.PathLike[str]) -> bool:
    try:
        return bool(open_source(run).ranks())
    except UnreadError:
        return False


def _answers(path: str | os.PathLike[str], *, foreign: bool) -> list[tuple[Answer, str]]:
    """Ask a run folder, and those of other models of its process beside it; return the answers, and how it was named."""
    told = os.fspath(path)
    if foreign and open_source(path).kind != "bitwitness":
        return []  # another tool's dump has rows and nothing else; the comparison tells of it
    return [(answer, told) for answer in answers(told)]


def _read(answer: Answer, told: str, count: int) -> _Read:
    """Read one run of so many that share a page."""
    run = Run(answer.path)
    findings = run.findings()
    path = told if os.fspath(answer.path) == os.fspath(os.path.normpath(told)) else os.fspath(answer.path)
    events: list[Event] = [*run.verdicts(), *findings]
    events += [note for note in run.notes() if note.message != "coverage"]
    ranks = [rank for verdict in answer.verdicts for rank in verdict.ranks]
    numbers = Numbers(run, [*ranks, *(finding.rank for finding in findings)])
    lines, heat = _numbers_of(numbers, count)
    story = story_of_run(answer, findings, path)
    if heat.broken and answer.watched is None and not answer.verdicts and not findings:
        tell_broken(story, *heat.broken)
    problems = [text(one) for one in (*numbers.problems, *numbers.thinned)]
    story.doubts += [one for one in dict.fromkeys(problems) if one not in story.doubts][:20]
    return _Read(run, story, events, lines, heat, answer.watched)


def _charts(read: list[_Read], found: Compared | None) -> dict[str, Any]:
    """Gather what the page draws."""
    charts: dict[str, Any] = {}
    names = _called(read)
    lines = [{**line.to_dict(), "run": called} for called, one in zip(names, read, strict=True) for line in one.lines]
    events = [(called, event) for called, one in zip(names, read, strict=True) for event in one.events]
    marks = [_mark(event, called) for called, event in events if not isinstance(event, Note)]
    if lines or marks:
        charts["timeline"] = {"lines": lines, "marks": marks[:_MARKS]}
    if found is not None:
        charts |= {"heat": found.heat.to_dict()} if found.heat.layers else {}
        return charts | _of_pair(found)
    heats = [one.heat.to_dict() | {"run": called} for called, one in zip(names, read, strict=True) if one.heat.layers]
    trees = [_tree(one) | {"run": called} for called, one in zip(names, read, strict=True) if one.heat.worst]
    for part, drawings in (("heat", heats), ("tree", trees)):  # the worst run's, and those that the page can switch to
        charts |= {part: drawings[0], f"more_{part}": drawings[1:]} if drawings else {}
    return charts | _events_table(events, several=len(read) > 1)


def _called(read: list[_Read]) -> list[str]:
    """Return how each run is called in the charts: by its folder, where that tells them apart; one alone by nothing."""
    folders = [one.run.path.name for one in read]
    if len(read) == 1:
        return [""]
    return [
        name(folder if folders.count(folder) == 1 else one.story.path)
        for folder, one in zip(folders, read, strict=True)
    ]


def _tree(one: _Read) -> dict[str, Any]:
    """Return the tree of a run's modules: as bad as the rules said or, where none were on, as unusual as its numbers were."""
    watched = one.watched
    if watched is not None and watched.rules:
        levels, words = levels_of_alerts(watched, one.heat.worst), ALERT_LEVELS
    else:
        levels, words = levels_of_run(one.heat.worst), LEVELS
    return {"root": tree_of(levels).to_dict(), "levels": list(words)}


def _numbers_of(numbers: Numbers, count: int) -> tuple[list[Line], HeatMap]:
    extent = numbers.extent()
    if not len(extent.steps):
        return [], HeatMap()
    maker = HeatMapMaker(extent.steps, len(numbers.ranks()), extent.names, extent.kinds, count)
    most = max(_LEAST_BUCKETS, min(MOST_BUCKETS, _POINTS // (len(numbers.ranks()) * count)))
    lines = []
    for rank, table in numbers.tables():
        lines += lines_of(rank, table, most)
        maker.add(rank, table)
    return lines, maker.made()


def _of_pair(found: Compared) -> dict[str, Any]:
    charts: dict[str, Any] = {}
    if found.levels:
        charts["tree"] = {"root": tree_of(found.levels).to_dict(), "levels": list(PAIR_LEVELS)}
    if found.graph.nodes:
        charts["graph"] = found.graph.to_dict()
    said = f"{found.total} compared values" + ("" if found.total == len(found.rows) else f"; {len(found.rows)} shown")
    charts["table"] = {
        "said": f"{said}; those that differ come first",
        "columns": list(found.columns),
        "rows": found.rows,
    }
    return charts


def _events_table(events: list[tuple[str, Event]], *, several: bool) -> dict[str, Any]:
    if not events:
        return {}
    first = sorted(
        events, key=lambda pair: (not isinstance(pair[1], Verdict), _SEVERITY.get(pair[1].to_event()["severity"], 3))
    )
    rows = [[*([called] if several else []), *_row(event)] for called, event in first[:_EVENTS]]
    said = f"{len(events)} events" + ("" if len(events) == len(rows) else f"; {len(rows)} shown, the gravest")
    columns = [*(["run"] if several else []), "step", "rank", "type", "severity", "sensor", "message", "site"]
    return {"table": {"said": said, "columns": columns, "rows": rows}}


def _row(event: Event) -> list[str]:
    told = event.to_event()
    rank = "" if told["rank"] is None else str(told["rank"])
    cells = [str(event.step), rank, told["type"], told["severity"], name(event.sensor)]
    return [*cells, text(event.message, 500), name(told["site"] or "")]


def _mark(event: Event, called: str) -> dict[str, Any]:
    said = f"{event.cause.replace('_', ' ')}; {event.action}" if isinstance(event, Verdict) else name(event.sensor)
    whose = f"{called}: " if called else ""
    return {"step": event.step, "verdict": isinstance(event, Verdict), "said": f"{whose}step {event.step}: {said}"}
