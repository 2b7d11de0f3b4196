"""``bitwitness status RUN``: is my run healthy? One line, and what to do; with -v the story."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD, UnreadError, UsageError
from bitwitness.version import __version__

if TYPE_CHECKING:
    from bitwitness.store.folder import Run
    from bitwitness.store.health import Health
    from bitwitness.store.life import Life

_CODES = {"fine": 0, "findings": EXIT_FINDINGS, "unread": EXIT_UNREAD}
_TOLD = 8  # ranks that are named: a job has thousands


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "status",
        aliases=["show"],
        help="is this run healthy, how much of it was looked at, what is to be done",
        description="Reads a run folder, also of a run that goes on or was killed, checks its checksums, and answers in a "
        "line. Exit code 0: healthy; 1: something was found; 3: not everything was looked at, settled or readable, or the run "
        "was killed.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder: what --out named")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell the whole story, verdict by verdict")
    add_json(parser, "the same as JSON; '-', the default, prints it")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Answer; return the exit code."""
    asked = _ask(args.run)
    lines = [line for one in asked for line in _lines(one, args.run, whole=args.verbose, named=len(asked) > 1)]
    answer(args, lambda: _told(asked, args.run), lambda: print("\n".join(lines)))
    return _CODES[_together(asked)]


def answer_of(run: str) -> dict[str, Any]:
    """Return what is told of a run folder as JSON; raises `UsageError` where it cannot be read."""
    return _told(_ask(run), run)


def _ask(path: str) -> list[_Asked]:
    """Ask a run folder, and those of other models that its process trained; the worst comes first."""
    from bitwitness.store.beside import runs_beside
    from bitwitness.store.folder import Run

    first = _asked(Run(path))
    others, unread = [], []
    for beside in runs_beside(path, first.description):
        try:
            others.append(_asked(Run(beside)))
        except (UsageError, OSError) as error:
            unread.append(str(error))
    models = first.description.get("models")
    missing = (models if isinstance(models, int) else 0) - 1 - len(others) - len(unread)
    if missing > 0:
        unread.append(f"{missing} of the run folders beside it, of other models of this process, are missing")
    first.doubt(unread)
    return sorted([first, *others], key=lambda one: _WORSE.index(one.health.status))


def _told(asked: list[_Asked], run: str) -> dict[str, Any]:
    first = next(one for one in asked if one.path == Path(run))
    beside = [{"run": str(one.path), **one.to_dict()} for one in asked if one is not first]
    worst = asked[0]
    return first.to_dict() | {
        "status": _together(asked),
        "sentence": _lines(worst, run, whole=False, named=bool(beside))[0],
        "to_do": worst.health.advice,
        "beside": beside,
    }


_WORSE = ("findings", "unread", "fine")


def _asked(run: Run) -> _Asked:
    run.check()
    with _understood(run.path):
        return _Asked(run)


@contextmanager
def _understood(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name what has another shape than what is written here: its checksums may still be right."""
    from bitwitness.files.shown import shown

    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise UnreadError(
            f"{shown(path)}: something that run.json or an events.jsonl tells has another shape than what bitwitness "
            f"{__version__} writes ({type(error).__name__}: {shown(error)}); ask with the version that wrote it"
        ) from error


def _together(asked: list[_Asked]) -> str:
    from bitwitness.store.health import worst_of

    return worst_of(one.health.status for one in asked)


def _lines(one: _Asked, run: str, *, whole: bool, named: bool) -> list[str]:
    """Return what is printed of one run; where a process has several models, each has a folder, and is named by it."""
    from bitwitness.files.shown import shown

    with _understood(one.path):
        lines = one.story() if whole else one.health.lines(f"bitwitness status -v {run}")
    return [f"{shown(one.path.name)}: {lines[0]}", *lines[1:]] if named else lines


class _Asked:
    """What a run folder answers."""

    def __init__(self, run: Run) -> None:
        from bitwitness.files.shown import shown
        from bitwitness.store.health import health_of
        from bitwitness.store.life import life_of
        from bitwitness.store.reader import absent_ranks, ranks_there

        self._run = run
        self._notes = [note for note in run.notes() if note.message == "coverage"]
        self._verdicts = run.verdicts()
        self._recorded = _recorded(run)
        self.path = Path(run.path)
        self.description = description = _description(run)
        self.life: Life = life_of(description)
        tables = _latest(self._notes)
        missing = _missing(self._notes, self._verdicts, description, self.life, run.ranks())
        nothing = not (
            tables or self._verdicts or self._recorded or self.life.state == "running" or "config" in description
        )
        problems = [
            *run.problems,
            *absent_ranks(description, ranks_there(run.path)),
            *missing,
            *_not_written(run, description),
        ]
        problems += ["there is nothing to tell of: no guard was on, and no rows were recorded"] if nothing else []
        self.health: Health = health_of(tables, self._verdicts, self.life, problems=list(dict.fromkeys(problems)))
        if self._recorded and not tables and not self._verdicts:
            _tell_recording(self.health, self._recorded)
        elif "config" in description and not tables:
            steps = description.get("steps", "some")
            self.health.sentence = self.health.sentence.replace("no guard was on", f"no verdict in {steps} steps")
        self._tables = tables
        origin = next(
            (one.message for one in run.findings() if one.evidence.get("kind") and one.severity == "error"), ""
        )
        if origin:
            self.health.sentence = self.health.sentence.replace(", named above", f" ({shown(origin, None)})")

    def doubt(self, problems: list[str]) -> None:
        """Add what could not be read beside this run."""
        if problems:
            self.health.doubts += problems
            self.health.status = "unread"
            self.health.sentence += f"; not read: {problems[0]}"

    def story(self) -> list[str]:
        """Return all that there is to tell."""
        from bitwitness.store.told import told_of
        from bitwitness.store.verdicts import tell_verdicts

        health = self.health
        lines = [health.sentence, *([f"to do: {health.advice}"] if health.advice else [])]
        lines.append(f"run: {self.life.state}{f', by {self.life.by}' * bool(self.life.by)}")
        lines += [self._recorded] if self._recorded else []
        lines += health.details
        for table in self._tables[:1]:  # of the first rank: what it costs and what it cannot check are alike
            lines += told_of(table)
        lines += [f"not covered: {gap}" for gap in health.gaps]
        return lines + tell_verdicts([verdict.to_event() for verdict in self._verdicts])

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
            "verdicts": [verdict.to_event() for verdict in self._verdicts],
            "coverage": self._tables,
        }


def _description(run: Run) -> dict[str, Any]:
    from bitwitness.errors import UsageError

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


def _tell_recording(health: Health, recorded: str) -> None:
    """Make the answer that of a recording: nothing was judged, and it is whole or not."""
    if health.status == "unread":
        health.sentence = f"{health.sentence}; {recorded}"
    else:
        health.sentence = f"{recorded}, whole as far as it goes; its numbers were not judged (compare does)"
