"""The other models of two processes, each with a recording beside the one that was named: compared, too, by their numbers.

Who compares the recordings of two scripts means all of them: that the first models agree is no all-clear for the second.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwitness.comparison.matching.shifted import begins_with
from bitwitness.comparison.measuring.drift import calls_a_step
from bitwitness.comparison.recordings import compare
from bitwitness.comparison.report import Report
from bitwitness.comparison.runs import RowSink
from bitwitness.errors import UsageError
from bitwitness.store.beside import runs_beside
from bitwitness.store.health import worst_of
from bitwitness.store.opening import open_source
from bitwitness.store.reader import read_description


@dataclass(slots=True)
class Beside:
    """What came of the other models: reports by the two folders, and what could not be compared."""

    reports: list[tuple[Path, Path, Report]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a line for each."""
        told = [
            f"beside them, {a.name} against {b.name}{_of_model(a)}: {report.conclusion}"
            for a, b, report in self.reports
        ]
        return told + [f"not compared: {problem}" for problem in self.problems]

    def earlier(self, named: Report) -> str:
        """Return the line of the model that parts before the one that was named, if one does; empty if none does.

        In one step, one that knows what made the difference before one that reads it from outside: another model's result.
        """
        told = zip(self.reports, self.lines(), strict=False)
        parted = [
            (_parts(report, calls_a_step(report.steps, named.steps), _steps_before(a)), line)
            for (a, _, report), line in told
        ]
        first, line = min(parted, default=((math.inf, False), ""))
        return line if first < _parts(named) else ""

    def worst(self, status: str) -> str:
        """Return the status of all together with one: what could not be compared counts beside findings, too."""
        return worst_of([status, *(report.status for *_, report in self.reports), *["unread"] * bool(self.problems)])

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON: nothing where there are no others."""
        if not self.reports and not self.problems:
            return {}
        reports = [{**report.to_dict(), "a": str(a), "b": str(b)} for a, b, report in self.reports]
        return {"beside": reports, "beside_not_compared": self.problems}


def _parts(report: Report, calls: int = 1, before: int = 0) -> tuple[float, bool]:
    """Return the step in which two runs of a model part, and whether by something that came from outside it.

    ``before``: another model's steps that had ended when this one was called for the first time: an average of weights that is
    tried behind each step holds what that step has made of them.
    """
    if report.status != "findings":
        return math.inf, False
    steps = [one.step // calls for one in (report.first, *report.exceeding[:1]) if one is not None]
    return before + min(steps, default=math.inf), report.first is None or report.first.reason in ("unknown", "loss")


def _of_model(run: Path) -> str:
    model = _class_of(run)
    return f" ({model})" if model else ""


def _steps_before(run: Path) -> int:
    """Return how many steps of the other models had ended when a model's recording began."""
    before = _described(run).get("steps_before", 0)
    return before if type(before) is int else 0


def _described(run: Path) -> dict[str, Any]:
    try:
        return read_description(run)
    except (UsageError, OSError):
        return {}


Folder = str | os.PathLike[str]


def compare_processes(
    a: Folder,
    b: Folder,
    *,
    sinks: Sequence[RowSink] = (),
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    **asked: Any,
) -> tuple[Report, Beside]:
    """Compare two recordings as `compare` does, and all other models of their processes.

    A model is held against the one that begins with its weights, where these tell all of them, or has its class: scripts call
    their models in any order, by which they are numbered.
    """
    left, right = _paired(a, b)
    report = compare(left[0], right[0], **asked, sinks=sinks, progress=progress)
    if right[0] != Path(b):
        report.note(f"{left[0].name} is held against {right[0].name}, which is its model, and so are the others")
    return report, _compared(left[1:], right[1:], **asked)


def compared_beside(a: Folder, b: Folder, **asked: Any) -> Beside:
    """Compare the other models of the processes of two recordings; ``asked`` as of `compare`."""
    left, right = _paired(a, b)
    return _compared(left[1:], right[1:], **asked)


def _paired(a: Folder, b: Folder) -> tuple[list[Path], list[Path]]:
    """Return the models of two processes, side by side, the named one of A first; these alone if they are of one process."""
    left, right = [Path(a), *_others(a)], [Path(b), *_others(b)]
    first, second = ({os.path.realpath(path) for path in paths} for paths in (left, right))
    if os.path.realpath(a) in second or os.path.realpath(b) in first:
        return left[:1], right[:1]
    if 1 < len(left) == len(right):
        begun, classes = ([_known_by(paths, what) for paths in (left, right)] for what in (_weights_of, _class_of))
        for known in (begun, classes):
            if all(known[0]) and len(set(known[0])) == len(left) and set(known[0]) == set(known[1]):
                return left, [right[known[1].index(one)] for one in known[0]]
    return left, right


def _known_by(paths: Sequence[Path], what: Callable[[Path], Hashable]) -> list[Hashable]:
    """Return what is known of each of some models; nothing of one that cannot be read, which is told where it is compared."""
    found: list[Hashable] = []
    for path in paths:
        with suppress(UsageError, OSError):
            found.append(what(path))
    return found if len(found) == len(paths) else [None]


def _weights_of(run: Path) -> Hashable:
    return begins_with(open_source(run))


def _class_of(run: Path) -> Hashable:
    return _described(run).get("model")


def _compared(left: Sequence[Path], right: Sequence[Path], **asked: Any) -> Beside:
    found = Beside()
    for one, other in zip(left, right, strict=False):
        try:
            found.reports.append((one, other, compare(one, other, **asked)))
        except (UsageError, OSError) as error:
            found.problems.append(f"{one.name} against {other.name}: {error}")
    alone = [path.name for path in (*left[len(right) :], *right[len(left) :])]
    if alone:
        whose = "A" if len(left) > len(right) else "B"
        found.problems.append(f"only the process of run {whose} has {', '.join(alone)}")
    return found


def _others(path: str | os.PathLike[str]) -> Sequence[Path]:
    try:
        return runs_beside(path, read_description(Path(path)))
    except (UsageError, OSError):  # another tool's recording, or damage that is told of elsewhere
        return []
