"""Is a run healthy, how much of it was looked at, and what is to be done: one answer, from what the run itself says.

The guard ends with it, and ``bitwitness status`` gives it from the run folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwitness.files.shown import shown
from bitwitness.finding import Action, Cause, Verdict
from bitwitness.store.life import Life

Table = Mapping[str, Any]
_NAMED = "look at what is named: an operator and its line, the data, or a parameter"
TRACE = "run it with 'bitwitness trace', which names the operator and the line"
_ADVICE = {
    Cause.TRANSIENT_HARDWARE: "note the device; if it strikes again it is a defect",
    Cause.PERSISTENT_HARDWARE: "take the device out of use, and resume elsewhere from the last checkpoint",
    Cause.CORRUPT_STATE: "resume from a checkpoint made before the step that precedes it: a later one may hold the fault",
    Cause.SOFTWARE: _NAMED,
    Cause.DATA: "look at the batch that is named",
    Cause.INCONCLUSIVE: "run on: it could not be proven; more ranks, or act = protect, let it be",
}


@dataclass(slots=True)
class Health:
    """The answer.

    Attributes
    ----------
    status
        ``fine``; ``findings``; ``unread``: something was not looked at, not settled or not readable, beside findings or not.
    sentence
        One line: healthy, or what is wrong.
    advice
        What to do; empty where nothing is to be done.
    gaps
        What was not covered, and why.
    doubts
        Why not everything is known.
    remark
        What is worth a line though nothing is wrong: how often a loss scale was dropped.
    worst
        The verdict that the reader has to act on, where there is one.

    """

    status: str
    sentence: str
    advice: str = ""
    gaps: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    remark: str = ""
    worst: Verdict | None = None

    @property
    def details(self) -> list[str]:
        """A line for each doubt."""
        return [f"not known: {doubt}" for doubt in self.doubts]

    def lines(self, more: str) -> list[str]:
        """Return the two or three lines that end a run; ``more``: where the rest can be read."""
        lines = [self.sentence]
        if self.advice:
            lines.append(f"to do: {self.advice}")
        elif self.remark:
            lines.append(self.remark)
        if self.gaps:
            rest = len(self.gaps) - 1
            lines.append(f"not covered: {self.gaps[0]}" + (f"; and {rest} more ({more})" if rest else ""))
        return lines


def health_of(
    tables: Sequence[Table], verdicts: Sequence[Verdict], life: Life, *, problems: Sequence[str] = ()
) -> Health:
    """Return the answer for one run.

    Parameters
    ----------
    tables
        What each instrument on each rank covered: the evidence of its last note ``coverage``.
    verdicts
        What was concluded.
    life
        Whether the run goes on, or how it ended.
    problems
        What of the run could not be read.

    """
    nonfinite = sum(int(_of(table, "nonfinite").get("bad", 0)) for table in tables)
    unproven = next((str(told) for table in tables if (told := table.get("stopped_at"))), "")
    seen = _seen(tables)
    gaps = list(dict.fromkeys(gap for table in tables for gap in table.get("not_covered", ())))
    doubts = [*_doubts(tables), *(shown(problem) for problem in problems)]
    advice = ""
    worst = _worst(verdicts) if verdicts else None
    if worst is not None:
        others = len(verdicts) - 1
        more = f" (and {others} more verdict{'s' * (others != 1)})" if others else ""
        what = f"{worst.cause.replace('_', ' ')}, {worst.action}: {worst.message}"
        sentence = f"NOT healthy: step {worst.step}: {what}{more}; {seen}"
        advice = _ADVICE.get(worst.cause, "")
    elif unproven:
        sentence = f"NOT healthy: {unproven}"
        advice = "look at the step and the site that are named; act = protect proves a suspicion before it stops"
    elif nonfinite:
        untraced = sum(int(_of(table, "nonfinite").get("untraced", 0)) for table in tables)
        counted, of = ("step", "with") if untraced == nonfinite else ("origin", "of")
        sentence = f"NOT healthy: {nonfinite} {counted}{'s' * (nonfinite > 1)} {of} NaN or Inf, named above; {seen}"
        advice = TRACE if untraced == nonfinite else _NAMED
    elif doubts:
        sentence = f"not known: {doubts[0]}; {seen}"
    else:
        sentence = f"healthy{_until(life)}: {seen}"
    found = bool(verdicts or unproven or nonfinite)
    remarks = (told for table in tables if (told := _of(table, "loss_scale").get("told")))
    status = "unread" if doubts or not _ended_well(life) else "findings" if found else "fine"
    if life.state == "unknown" and not found:
        sentence = f"not known: {[*doubts, life.by or 'run.json does not tell how the run ended'][0]}; {seen}"
    elif not _ended_well(life):
        sentence = f"{life.state}{f' ({life.by})' * bool(life.by)}: {'until then ' * (not found)}{sentence}"
    return Health(status, sentence, advice, gaps, doubts, next(remarks, ""), worst)


def worst_of(statuses: Iterable[str]) -> str:
    """Return the status of several answers together: what could not be read counts beside findings, too."""
    found = set(statuses)
    return "unread" if "unread" in found else "findings" if "findings" in found else "fine"


def _of(table: Table, name: str) -> Table:
    found = table.get(name)
    return found if isinstance(found, Mapping) else {}


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict that the reader has to act on: one that stopped the run, else the first that was not healed."""
    stopped = [verdict for verdict in verdicts if verdict.action is Action.STOPPED]
    open_ = [verdict for verdict in verdicts if verdict.action is not Action.HEALED]
    return (stopped or open_ or list(verdicts))[0]


def _ended_well(life: Life) -> bool:
    """Whether all that there was reached the run folder: an end that came through us leaves nothing untold."""
    return life.state not in ("killed", "lost", "unknown")


def _until(life: Life) -> str:
    """Say how far the answer reaches."""
    match life.state:
        case "running":
            return " so far"
        case "failed":
            return f" until the script failed ({life.by})"
        case "interrupted" | "terminated":
            return f" until it was {life.state} ({life.by})"
    return ""


def _seen(tables: Sequence[Table]) -> str:
    """Say how much was looked at."""
    parts = []
    guards = [table for table in tables if "parameters" in table]
    if guards:
        first = guards[0]
        steps = _of(first, "steps")
        held, judged = steps.get("held", 0), steps.get("judged", 0)
        times = "" if held == judged else f" ({judged} times gradients)"
        parameters = _of(first, "parameters")
        seen = f"{parameters.get('watched')} of {parameters.get('of')} parameters, {held} steps{times}"
        parts.append(f"{seen}, {steps.get('deep', 0)} of them deep")
        share = _of(first, "operators").get("share_checked")
        if isinstance(share, float) and _of(first, "operators").get("flops_seen") and steps.get("deep"):
            parts[-1] += f" ({share:.1%} of the FLOPs checked)"
        dismissed, suspicions = (sum(table.get(name, 0) for table in guards) for name in ("dismissed", "suspicions"))
        told = f"{suspicions} suspicion{'s' * (suspicions > 1)}, {dismissed} dismissed"
        parts.append(told if suspicions else "no suspicion")
    else:
        counts = [_of(table, "steps") for table in tables]
        held, judged = (max((step.get(name, 0) for step in counts), default=0) for name in ("held", "judged"))
        if counts:
            times = "" if held == judged else f" ({judged} times gradients)"
            parts.append(f"NaN and Inf: {held} steps{times} looked at")
    return "; ".join(parts) or "no guard was on"


def _doubts(tables: Sequence[Table]) -> Iterator[str]:
    """Yield why the numbers may not be called healthy though nothing was found."""
    for table in tables:
        if not _of(table, "steps").get("held", 0):
            yield "nothing was looked at: no step's gradients were judged"
        elif count := _of(table, "steps").get("by_hand"):
            yield f"no optimizer stepped: of what {count} forwards led to, the last gradients alone were looked at"
        if table.get("left_open"):
            count = table["left_open"]
            yield f"{count} suspicion{'s' * (count > 1)} could neither be proven nor dismissed"
        if why := _of(table, "replay").get("disturbed"):
            yield f"the training may have been changed by being run again: {why}"
        for part, why in _of(table, "failures").items():
            yield f"the guard failed in its {part} and did without it: {why}"
        for name, why in _of(_of(table, "sensors"), "off").items():
            yield f"sensor {name} was off: {why}"
