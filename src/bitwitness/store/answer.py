"""What a run folder answers: healthy or not, what is to be done, what was looked at; ``status`` and ``report`` say the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.shown import shown
from bitwitness.finding import Finding
from bitwitness.store.alerted import answer_watched, ended_early, place_of, rule_of
from bitwitness.store.beside import runs_beside
from bitwitness.store.covered import expected_json, not_protected, tables_of
from bitwitness.store.covered import lines_of as lines_of_tables
from bitwitness.store.folder import Run
from bitwitness.store.health import Health, health_of, worst_of
from bitwitness.store.life import Life, life_of
from bitwitness.store.reader import absent_ranks, ranks_there
from bitwitness.store.told import told_of
from bitwitness.store.verdicts import tell_verdicts
from bitwitness.store.warned import read_clearances, warned_of
from bitwitness.store.watched import Watched, watched_in
from bitwitness.version import __version__

_TOLD = 8  # ranks that are named: a job has thousands


def answer_of(run: str) -> dict[str, Any]:
    """Return what is told of a run folder as JSON; raises `UsageError` where it cannot be read."""
    return told_together(answers(run), run)


def answers(path: str) -> list[Answer]:
    """Ask a run folder, and those of other models that its process trained; the worst comes first."""
    first = _answer(Run(path))
    others, unread = [], []
    for beside in runs_beside(path, first.description):
        try:
            others.append(_answer(Run(beside)))
        except (UsageError, OSError) as error:
            unread.append(str(error))
    models = first.description.get("models")
    missing = (models if isinstance(models, int) else 0) - 1 - len(others) - len(unread)
    if missing > 0:
        unread.append(f"{missing} of the run folders beside it, of other models of this process, are missing")
    first.doubt(unread)
    return sorted([first, *others], key=lambda one: (_WORSE.index(one.health.status), not one.is_broken))


def told_together(asked: list[Answer], run: str) -> dict[str, Any]:
    """Return what is told of a run folder and those beside it, ready for JSON."""
    first = next(one for one in asked if one.path == Path(run))
    beside = [{"run": str(one.path), **one.to_dict()} for one in asked if one is not first]
    worst = asked[0]
    return first.to_dict() | {
        "status": status_together(asked),
        "sentence": lines_of(worst, run, whole=False, named=bool(beside))[0],
        "to_do": worst.health.advice,
        "beside": beside,
    }


_WORSE = ("findings", "unread", "fine")


def _answer(run: Run) -> Answer:
    run.check()
    with understood(run.path):
        return Answer(run)


@contextmanager
def understood(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name what has another shape than what is written here: its checksums may still be right."""
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise UnreadError(
            f"{shown(path)}: something that run.json or an events.jsonl tells has another shape than what bitwitness "
            f"{__version__} writes ({type(error).__name__}: {shown(error)}); ask with the version that wrote it"
        ) from error


def status_together(asked: list[Answer]) -> str:
    """Return the status of all together."""
    return worst_of(one.health.status for one in asked)


def lines_of(one: Answer, run: str, *, whole: bool, named: bool) -> list[str]:
    """Return what is printed of one run; where a process has several models, each has a folder, and is named by it."""
    with understood(one.path):
        lines = one.story() if whole else one.health.lines(f"bitwitness status -v {run}")
        lines += [device.line() for device in one.warned[:_TOLD]]
        lines += [f"… and {len(one.warned) - _TOLD} more devices"] if len(one.warned) > _TOLD else []
    return [f"{shown(one.path.name)}: {lines[0]}", *lines[1:]] if named else lines


class Answer:
    """What a run folder answers.

    Attributes
    ----------
    path, description
        The folder, and its ``run.json`` (empty where that cannot be read).
    life, health
        Whether it lives or how it ended; healthy or not.
    verdicts, tables
        What was concluded; what each instrument on each rank covered.
    warned
        The devices that were convicted, and whether they read Warning still.
    recorded
        What was recorded, in words; empty where nothing was.
    watched
        What a monitor's rules said, and of what; None where there was no monitor.

    """

    def __init__(self, run: Run) -> None:
        self._run = run
        notes = run.notes()
        self._notes = [note for note in notes if note.message == "coverage"]
        self.verdicts = run.verdicts()
        self.path = Path(run.path)
        cleared, damaged = read_clearances(self.path)
        self.warned = warned_of(self.verdicts, cleared)
        self.description = description = _description(run)
        findings = run.findings()
        self.watched: Watched | None
        self.watched, unread = watched_in(run, description, findings, notes)
        self.recorded = _recorded(run)
        self.life: Life = life_of(description)
        self.tables = tables = _latest(self._notes)
        missing = _missing(self._notes, self.verdicts, description, self.life, run.ranks())
        nothing = not (tables or self.verdicts or self.recorded or self._monitors or self.life.state == "running")
        problems = [
            *run.problems,
            *unread,
            *damaged,
            *absent_ranks(description, ranks_there(run.path)),
            *missing,
            *_not_written(run, description),
        ]
        if nothing and "config" not in description:
            what = (
                "its monitor wrote no series"
                if "monitor" in description
                else "no guard was on, and no rows were recorded"
            )
            problems.append(f"there is nothing to tell of: {what}")
        self.health: Health = health_of(tables, self.verdicts, self.life, problems=list(dict.fromkeys(problems)))
        self._tell(findings)

    @property
    def is_broken(self) -> bool:
        """Whether its series hold NaN or Inf, which needs no proof."""
        watched = self.watched
        return watched is not None and (watched.nonfinite is not None or watched.broken is not None)

    @property
    def _monitors(self) -> bool:
        """Whether there are series, or a monitor that goes on will write some."""
        return self.watched is not None and (bool(self.watched.steps) or self.watched.found)

    def _tell(self, findings: list[Finding]) -> None:
        """Make the answer that of what the run was: guarded, recorded, monitored, or several of these."""
        health, description = self.health, self.description
        judged = bool(self.tables or self.verdicts)
        if self.recorded and not judged:
            _tell_recording(health, self.recorded, self.life)
        elif "config" in description and not self.tables:
            steps = description.get("steps", "some")
            health.sentence = health.sentence.replace("no guard was on", f"no verdict in {steps} steps")
        if "monitor" in description and not judged and not self._monitors:
            health.sentence = health.sentence.removesuffix("; no guard was on")
        origin = next((one.message for one in findings if one.evidence.get("kind") and one.severity == "error"), "")
        if origin:
            health.sentence = health.sentence.replace(", named above", f" ({shown(origin, None)})")
        if self.watched is not None and (self._monitors or self.life.state == "running"):
            settings = description.get("monitor")
            settings = settings if isinstance(settings, dict) else {}
            guarded = any("parameters" in table for table in self.tables) or "config" in description
            beside = "the guard: " if guarded else "the tracer: " if judged else "" if self.recorded else None
            answer_watched(health, self.watched, self.life, settings, beside=beside)

    def doubt(self, problems: list[str]) -> None:
        """Add what could not be read beside this run."""
        if problems:
            self.health.doubts += problems
            self.health.status = "unread"
            self.health.sentence += f"; not read: {problems[0]}"

    def story(self) -> list[str]:
        """Return all that there is to tell."""
        health = self.health
        lines = [health.sentence, *([f"to do: {health.advice}"] if health.advice else [])]
        lines.append(f"run: {self.life.state}{f', by {self.life.by}' * bool(self.life.by)}")
        lines += [self.recorded] if self.recorded else []
        alerts = [] if self.watched is None else self.watched.alerts
        lines += [_alert(one) for one in alerts[:_TOLD]]
        lines += [f"… and {len(alerts) - _TOLD} more alerts, in rank*/events.jsonl"] if len(alerts) > _TOLD else []
        lines += health.details
        for table in self.tables[:1]:  # of the first rank: what it costs and what it cannot check are alike
            lines += [*lines_of_tables(tables_of(table)), *told_of(table)]
        lines += [f"not covered: {gap}" for gap in health.gaps]
        return lines + tell_verdicts([verdict.to_event() for verdict in self.verdicts])

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        health = self.health
        return {
            "status": health.status,
            "sentence": health.sentence,
            "to_do": health.advice,
            "state": self.life.state,
            "ended_by": self.life.by,
            "problems": health.doubts,
            "compared": None,
            "not_covered": health.gaps,
            "verdicts": [verdict.to_event() for verdict in self.verdicts],
            "devices": [device.to_dict() for device in self.warned],
            "coverage": self.tables,
            "not_protected": not_protected(guarded[0])
            if (guarded := [t for t in self.tables if "parameters" in t])
            else None,
            "expected_steps": expected_json(guarded[0]) if guarded else None,
            "watched": None if self.watched is None else self.watched.to_dict(),
        }


def _description(run: Run) -> dict[str, Any]:
    try:
        return run.description
    except UsageError:  # told among the problems
        return {}


def _latest(notes: list[Any]) -> list[dict[str, Any]]:
    """Return what each rank covered last, by rank; a guard and a tracer of one run have a table each."""
    latest = {(note.rank, "parameters" in note.evidence): note.evidence for note in notes}
    return [latest[key] for key in sorted(latest, key=lambda key: (key[0] or 0, not key[1]))]


def _missing(
    notes: list[Any], verdicts: list[Any], description: dict[str, Any], life: Life, there: list[int]
) -> list[str]:
    """Return what a run that ended must have left and has not: each watched rank's coverage, and every verdict in it."""
    if "config" not in description or life.state in ("running", "killed", "lost"):
        return []
    size = description.get("world_size")
    covered = {note.rank for note in notes}
    # Ranks that train each by themselves are known by what they left.
    expected = range(min(size, 10_000)) if isinstance(size, int) else there
    gone = [rank for rank in expected if rank not in covered]
    lines = [
        f"what rank {rank} looked at is not known: its events.jsonl has no end, as of one that was killed"
        for rank in gone[:_TOLD]
    ]
    lines += [f"{len(gone) - _TOLD} more ranks left none"] if len(gone) > _TOLD else []
    told = max((len(note.evidence.get("verdicts") or ()) for note in notes), default=0)
    if told > len(verdicts):
        lines.append(f"{told} verdicts were reached and {len(verdicts)} are in events.jsonl: it is cut or damaged")
    return lines


def _not_written(run: Run, description: dict[str, Any]) -> list[str]:
    """Return what the run itself says that it could not record."""
    lines = [note.message for note in run.notes() if note.sensor == "record" and note.severity != "info"]
    lost = description.get("not_recorded")
    return [*lines, f"{lost} events were not recorded"] if isinstance(lost, int) and lost else lines


def _recorded(run: Run) -> str:
    steps = run.steps()
    if not steps:
        return ""
    ranks = [rank for rank in run.ranks() if run.steps(rank)]
    return f"recorded: {len(steps)} steps ({steps[0]} to {steps[-1]}) of {len(ranks)} ranks"


def _tell_recording(health: Health, recorded: str, life: Life) -> None:
    """Make the answer that of a recording: nothing was judged, and it is whole or not."""
    if health.status == "unread":
        health.sentence = f"{health.sentence}; {recorded}"
    else:
        whole = "whole as far as it goes; its numbers were not judged (compare does)"
        health.sentence = f"{ended_early(life)}{recorded}, {whole}"


def _alert(finding: Finding) -> str:
    return f"alert: {place_of(finding)}: {rule_of(finding)}: {shown(finding.message, None)}"
