"""The story of a report in its order: the verdict, what to do, why it may be believed, the evidence, what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bitwitness.finding import Finding, Verdict
from bitwitness.report.alerts import alerts_of
from bitwitness.report.believed import believed
from bitwitness.report.clean import clean, mapping, name, text
from bitwitness.report.evidence import Block, blocks_of, coverage_blocks
from bitwitness.report.words import (
    NOT_JUDGED,
    NOTHING,
    headline_of,
    headline_of_pair,
    nothing_found,
    to_do_of_pair,
    word_of,
)
from bitwitness.store.alerted import watched_of
from bitwitness.store.answer import Answer
from bitwitness.store.health import worst_of
from bitwitness.store.told import told_of

if TYPE_CHECKING:
    from bitwitness.comparison.report import Report

_EVENTS = 50  # that are told with all their evidence; the table has the rest
_LINES = 100  # of one list


@dataclass(slots=True)
class Told:
    """A verdict or a finding: a title, what was concluded, and its evidence."""

    title: str
    message: str
    where: str
    blocks: list[Block] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        blocks = [block.to_dict() for block in self.blocks]
        return {"title": self.title, "message": self.message, "where": self.where, "evidence": blocks}


@dataclass(slots=True)
class RunStory:
    """One run's.

    Attributes
    ----------
    status, sentence
        As ``bitwitness status`` gives them.
    headline, to_do
        The same for whoever decides, and what to do.
    believed
        Why the numbers may be believed: what was looked at, and how.
    doubts, gaps
        Why not everything is known; what was not covered.
    events
        Verdicts and findings of weight, with their evidence.
    price
        What the watch cost, and what that bought.
    facts
        What the run was: (name, value).
    coverage
        What was looked at of what there was, and how soon a fault is seen, as tables.
    verdicts
        How many there are.
    attention, word
        Something is to be seen that status does not judge; how the run is called then.
    watched
        What a monitor's rules said, in short; None where there was no monitor.

    """

    path: str
    status: str
    sentence: str
    headline: str
    to_do: list[str]
    believed: list[str]
    doubts: list[str]
    gaps: list[str]
    events: list[Told]
    price: list[str]
    facts: list[tuple[str, str]]
    coverage: list[Block] = field(default_factory=list)
    verdicts: int = 0
    attention: bool = False
    word: str = ""
    watched: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "run": self.path,
            "status": self.status,
            "sentence": self.sentence,
            "headline": self.headline,
            "to_do": self.to_do,
            "believed_because": self.believed,
            "doubts": self.doubts,
            "not_covered": self.gaps,
            "events": [event.to_dict() for event in self.events],
            "coverage_and_price": self.price,
            "coverage": [block.to_dict() for block in self.coverage],
            "facts": dict(self.facts),
            "watched": self.watched,
        }


@dataclass(slots=True)
class Story:
    """A whole report's; ``conclusion``: the exact sentence behind the headline."""

    kind: str
    status: str
    headline: str
    conclusion: str
    to_do: list[str]
    runs: list[RunStory]
    doubts: list[str] = field(default_factory=list)

    @property
    def attention(self) -> bool:
        """Whether a run's story has something to look at though its status is fine; a pair is judged by being compared."""
        seen = [run for run in self.runs if run.attention and not (self.kind == "pair" and run.word == NOT_JUDGED)]
        return self.status == "fine" and bool(seen)

    @property
    def word(self) -> str:
        """What it comes to, in a word or two."""
        if self.status == "findings":
            return "something was found"
        if self.status == "unread":
            found = any(run.verdicts or (run.watched or {}).get("alerts") for run in self.runs)
            return "something was found, and not all is known" if found else "not known"
        words = dict.fromkeys(run.word for run in self.runs if run.attention and run.word)
        if self.attention:
            return "; ".join(words) or "healthy as far as it was judged; look below"
        if self.kind == "pair":
            return "no operator computed wrongly"
        return "healthy" if all(run.watched is None or run.price for run in self.runs) else "nothing unusual"


def story_of_run(answer: Answer, findings: Sequence[Finding], path: str) -> RunStory:
    """Tell one run's story."""
    health = answer.health
    verdicts = sorted(answer.verdicts, key=lambda one: one is not health.worst)  # what the headline tells comes first
    told = [told_verdict(verdict) for verdict in verdicts[:_EVENTS]]
    word = word_of(answer)
    heavy = [one for one in findings if one.severity == "error" and (one.sensor == "nonfinite" or not answer.verdicts)]
    told += [
        told_finding(one)
        for one in [*heavy, *(one for one in alerts_of(answer.watched) if one not in heavy)][: _EVENTS - len(told)]
    ]
    advices = [text(one.evidence["advice"]) for one in heavy if isinstance(one.evidence.get("advice"), str)]
    to_do = [_sentence(text(health.advice))] if health.advice else []
    to_do += [_sentence(advice) for advice in dict.fromkeys(advices) if advice][:5]
    price = [line for table in answer.tables[:1] for line in told_of(table) if not line.startswith("not covered: ")]
    gaps = [*health.gaps, *_unchecked(answer.tables)]
    return RunStory(
        path=text(path),
        status=health.status,
        sentence=text(health.sentence),
        headline=headline_of(answer),
        to_do=to_do or [nothing_found(answer)],
        believed=believed(answer),
        doubts=[text(doubt) for doubt in health.doubts[:_LINES]],
        gaps=[text(gap) for gap in gaps[:_LINES]],
        events=told,
        price=[text(line) for line in price[:_LINES]],
        facts=_facts(answer),
        coverage=[block for table in answer.tables[:1] for block in coverage_blocks(table)],
        verdicts=len(answer.verdicts),
        attention=health.status == "fine" and bool(word),
        word=word,
        watched=None if answer.watched is None else clean(answer.watched.to_dict()),
    )


def tell_broken(run: RunStory, step: int, rank: int, where: str) -> None:
    """Tell of NaN or Inf in the series of a run of which no instrument said a word: it is none of status' to tell."""
    run.doubts.append(
        f"its series hold NaN or Inf, first in {where} at step {step} on rank {rank}, which nobody judged"
    )
    run.attention, run.word = True, ""
    run.headline += " But its series hold NaN or Inf, which nobody judged: see below."
    run.to_do = [
        f"Look at {where}, step {step}, rank {rank}: 'bitwitness trace' names the operator that makes NaN or Inf.",
        *(line for line in run.to_do if line != NOTHING),
    ]


def story_of(runs: list[RunStory], report: Report | None) -> Story:
    """Put the stories of runs, and their comparison, together: the worst comes first."""
    status = worst_of([*(run.status for run in runs), *([report.status] if report is not None else [])])
    if report is not None:
        doubts = [text(one) for one in (*report.unaligned, *report.problems)[:_LINES]]
        headline, to_do = headline_of_pair(report), to_do_of_pair(report)
        return Story("pair", status, headline, text(report.conclusion), to_do, runs, doubts)
    worst = min(runs, key=badness)
    headline = worst.headline if len(runs) == 1 else f"{name(worst.path)}: {worst.headline}"
    return Story("run" if len(runs) == 1 else "runs", status, headline, worst.sentence, worst.to_do, runs)


def badness(run: RunStory) -> tuple[object, ...]:
    """Return what runs are sorted by, the worst first: verdicts, NaN or Inf, alerts, what is not known, how it ended."""
    watched = run.watched or {}
    nonfinite = watched.get("nonfinite") or watched.get("unwatched_nonfinite")
    alerts = watched.get("alerts") or 0
    status = ("findings", "unread", "fine").index(run.status)
    return not run.verdicts, not nonfinite, status, -alerts, not run.attention


def told_verdict(verdict: Verdict) -> Told:
    """Tell a verdict with its evidence."""
    who = ", ".join(f"rank {rank}" for rank in verdict.ranks[:8]) or "nobody named"
    title = f"Step {verdict.step}: {verdict.cause.replace('_', ' ')}, {who}; {verdict.action}"
    where = "" if verdict.site is None else text(verdict.site, 300)
    code = f" Fault code {name(verdict.fault_code)}." if verdict.fault_code else ""
    return Told(title, text(verdict.message) + code, where, blocks_of(verdict))


def told_finding(finding: Finding) -> Told:
    """Tell a finding with its evidence."""
    title = f"Step {finding.step}: {name(finding.sensor)} on rank {finding.rank}"
    return Told(title, text(finding.message), text(finding.site, 300), blocks_of(finding))


def _sentence(words: str) -> str:
    """Return status' words as a sentence."""
    return words[:1].upper() + words[1:] + ("" if words.endswith(".") else ".")


def _unchecked(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which operators were not checked, as `told_of` does."""
    lines = [line for table in tables[:1] for line in told_of(table)]
    return [line.removeprefix("not covered: ") for line in lines if line.startswith("not covered: ")]


def _facts(answer: Answer) -> list[tuple[str, str]]:
    found = answer.description
    command = found.get("command")
    versions = mapping(found.get("versions"))
    devices = found.get("devices")
    listed = [name(one) for one in devices[:16]] if isinstance(devices, list) else []
    spent = sum(table["own_seconds"] for table in answer.tables if isinstance(table.get("own_seconds"), int | float))
    facts = [
        ("state", answer.life.state + (f", by {answer.life.by}" if answer.life.by else "")),
        ("recorded", answer.recorded),
        ("monitored", "" if answer.watched is None else watched_of(answer.watched)),
        ("command", text(" ".join(map(str, command)), 400) if isinstance(command, list) else ""),
        ("started", name(found.get("started") or "")),
        ("ranks", name(found.get("world_size") or "")),
        ("devices", "; ".join(listed) + ("; …" if isinstance(devices, list) and len(devices) > len(listed) else "")),
        ("versions", ", ".join(f"{name(key)} {name(value)}" for key, value in list(versions.items())[:8])),
        ("the guard's own time", f"{spent:.3g} s, of all ranks together" if spent else ""),
    ]
    return [(key, text(value)) for key, value in facts if value]
