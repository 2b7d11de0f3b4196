"""What a monitored run's alerts mean for its answer: the sentence, what is to be done, what the rules cannot tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwitness.config.monitoring import KINDS, RULES
from bitwitness.files.shown import shown
from bitwitness.finding import Finding
from bitwitness.store.health import TRACE, Health, worst_of
from bitwitness.store.life import Life
from bitwitness.store.watched import PREFIX, Watched

_LONGEST = 400  # of an alert's words: a name in them may be longer than anybody reads
UNPROVEN = "unusual, and nobody has proven it wrong"


def answer_watched(
    health: Health, watched: Watched, life: Life, settings: Mapping[str, Any], *, beside: str | None
) -> None:
    """Make a run's answer tell what its rules said.

    ``beside``: who has an answer already (``the guard: ``), which stays; None where nobody has.
    """
    before = health.status
    health.gaps += gaps_of(watched, settings)
    health.doubts += [shown(one) for one in watched.failures]
    if watched.found:
        health.status = worst_of([health.status, "findings"])
        health.advice = "; ".join(dict.fromkeys(filter(None, (health.advice, advice_of(watched)))))
    if health.doubts:
        health.status = "unread"
    if beside is not None:
        what = said_of(watched) if watched.found else watched_of(watched)
        first = watched.found and before != "findings"  # what was proven comes before what was seen
        health.sentence = f"{what}; {beside}{health.sentence}" if first else f"{health.sentence}; {what}"
        return
    sentence = said_of(watched)
    if not watched.found and not watched.steps:
        sentence = f"monitored, no alert so far: {sentence}"
    elif not watched.found and watched.rules:
        far = " so far" if life.state == "running" else ""
        sentence = (
            f"nothing unusual{far}: {sentence}; whether the arithmetic is right was not checked ('bitwitness run' does)"
        )
    unread = f"not known: {health.doubts[0]}; " if health.doubts and not watched.found else ""
    health.sentence = f"{ended_early(life)}{unread}{sentence}"


def ended_early(life: Life) -> str:
    """Say how a run ended that did not come to its end, as the beginning of a sentence; empty for one that did."""
    by = f" ({shown(life.by, _LONGEST)})" if life.by else ""
    match life.state:
        case "failed":
            return f"the script failed{by}; until then "
        case "interrupted" | "terminated":
            return f"it was {life.state}{by}; until then "
        case "killed" | "lost" | "unknown":
            return f"{life.state}{by}: until then "
    return ""


def said_of(watched: Watched) -> str:
    """Return what was alerted first, how many alerts there were, and what was looked at."""
    first, broken = watched.first, watched.broken
    parts = [] if broken is None else [_broken_of(watched)]
    if first is not None:
        parts += [_first_of(watched, first), f"{count(len(watched.alerts), 'alert')} in all"]
    parts += [shown(one.message, _LONGEST) for one in watched.post_mortems[:1]]
    return "; ".join([*parts, watched_of(watched)])


def _first_of(watched: Watched, first: Finding) -> str:
    nonfinite = watched.nonfinite
    if first is nonfinite:
        return f"NOT healthy: NaN or Inf at {place_of(first)}: {shown(first.message, _LONGEST)}"
    said = f"first at {place_of(first)}: {rule_of(first)}: {shown(first.message, _LONGEST)}"
    if nonfinite is None:
        return said if watched.broken is not None else f"{UNPROVEN}: {said}"
    then = f"then NaN or Inf at {place_of(nonfinite)}: {shown(nonfinite.message, _LONGEST)}"
    return f"NOT healthy: unusual {said}; {then}"


def _broken_of(watched: Watched) -> str:
    broken = watched.broken
    if broken is None:
        return ""
    where = f"first at step {broken.step}, rank {broken.rank} in {shown(broken.series, _LONGEST)}"
    return f"NOT healthy: the series hold NaN or Inf, {where}, and no rule was on to say so"


def watched_of(watched: Watched) -> str:
    """Say how much was looked at, and by whom."""
    if not watched.steps and watched.unread:
        return f"none of its series can be read: {shown(watched.unread[0], _LONGEST)}"
    if not watched.steps:
        return "no step of its series is on disk yet (they are written every ten seconds)"
    steps = f"{count(len(watched.steps), 'step')} ({watched.steps[0]} to {watched.steps[-1]})"
    much = f"{watched.series} series over {steps} of {count(watched.ranks, 'rank')}"
    if not watched.rules:
        clean = "" if watched.found else "; they hold no NaN or Inf"
        return f"monitored: {much}, which no rules watched{clean}"
    some = "" if set(RULES) <= set(watched.rules) else f" {', '.join(watched.rules)} alone"
    return f"{much} were watched by rules{some}"


def advice_of(watched: Watched) -> str:
    """Say what to do about it."""
    if watched.nonfinite is not None or watched.broken is not None:
        return TRACE
    first = watched.first
    if first is None:
        return ""
    return (
        f"look at step {first.step} in the charts of 'bitwitness report'; 'bitwitness run' proves or dismisses a wrong number, "
        "and 'bitwitness compare' with a good run says where the two part"
    )


def gaps_of(watched: Watched, settings: Mapping[str, Any]) -> list[str]:
    """Return what a monitor does not tell."""
    gaps = []
    if off := [rule for rule in RULES if rule not in watched.rules]:
        gaps.append(
            f"rules that were off: {', '.join(off)}" if watched.rules else "no rules were on: nothing was judged"
        )
    gaps.append(
        "whether the arithmetic is right: a wrong number of the usual size moves no series; the guard checks that"
    )
    if isinstance(targets := settings.get("targets"), list) and targets:
        gaps.append(f"modules other than {shown(', '.join(map(str, targets)), _LONGEST)}")
    kinds = settings.get("kinds")
    if isinstance(kinds, list) and (left := [kind for kind in KINDS if kind not in kinds]):
        gaps.append(f"kinds of series: {', '.join(left)}")
    gaps += [shown(one, _LONGEST) for one in dict.fromkeys(watched.remarks)]
    chosen = {name: settings.get(name) for name in ("steps", "interval", "times", "ranks")}
    if some := [f"{name} = {shown(value, 80)}" for name, value in chosen.items() if value not in (None, 0, 1)]:
        gaps.append(f"all but what was asked for: {', '.join(some)}")
    return gaps


def place_of(finding: Finding) -> str:
    """Return when and on which rank it was."""
    return f"step {finding.step}, rank {finding.rank}"


def rule_of(finding: Finding) -> str:
    """Return the name of the rule that spoke."""
    return shown(finding.sensor.removeprefix(PREFIX), 80)


def count(number: int, what: str) -> str:
    """Return a number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"
