"""What a report tells of a run that rules watched: the headline, why it may be believed, the alerts with their evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping

from bitwitness.finding import Finding
from bitwitness.report.clean import mapping, text
from bitwitness.store.alerted import count, place_of, rule_of, watched_of
from bitwitness.store.answer import Answer
from bitwitness.store.watched import NONFINITE, Watched

ALERTS, POST_MORTEMS = 20, 5  # that are told with their evidence; the table has all
LEVELS = ("no alert", "moved with another", "one alert", "several alerts", "NaN or Inf")
"""What the tree's levels are called where rules watched."""


def headline_of_watched(watched: Watched) -> str:
    """Return what is concluded of a run that rules watched, or that was only written."""
    first, broken, nonfinite = watched.first, watched.broken, watched.nonfinite
    told = []
    if broken is not None:
        where = f"first in {text(broken.series, 120)} at step {broken.step} on rank {broken.rank}"
        told.append(f"The series hold NaN or Inf, {where}, and no rule was on to say so.")
    if first is not None and first is nonfinite:
        told.append(f"NaN or Inf came up at {_when(first)}: {_words(first)}.")
    elif first is not None:
        told.append(f"{_unusual(first)}{'' if nonfinite is None else f', and then NaN or Inf at {_when(nonfinite)}'}.")
    if first is not None:
        told.append(f"{count(len(watched.alerts), 'alert')} in all.")
        told += [_sentence(_words(one)) for one in watched.post_mortems[:1]]
    elif broken is None and watched.rules and watched.steps:
        told.append(
            f"Nothing unusual was seen in {count(len(watched.steps), 'step')} of {watched.series} series that rules watched."
        )
    elif broken is None:
        there = bool(watched.steps or watched.unread)
        told.append(_sentence(watched_of(watched)) if there else "Nothing was alerted so far; no series are there yet.")
    return " ".join(told)


def _unusual(first: Finding) -> str:
    said = f"Something unusual came up, first at {_when(first)}: {rule_of(first)}: {_words(first)}"
    return f"{said}; nobody has proven it wrong"


def _when(finding: Finding) -> str:
    return place_of(finding).replace(", ", " on ")


def _words(finding: Finding) -> str:
    return text(finding.message, 300)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def believed_of(answer: Answer) -> list[str]:
    """Say what the rules looked at, and how sure they are."""
    watched = answer.watched
    if watched is None or not watched.rules or not watched.steps:
        return []
    numbers = mapping(answer.description.get("monitored")).get("series_steps")
    lines = [_sentence(watched_of(watched))]
    if isinstance(numbers, int) and numbers:
        lines.append(f"On the first rank {numbers} numbers were held against them.")
    if "nonfinite" in watched.rules:
        lines.append("NaN and Inf are counted in every element of what was looked at: no chance is in that.")
    if set(watched.rules) - {"nonfinite"}:
        lines.append("Sizes are held against each series' own history, once it has one; an alert of them may be false.")
    return lines


def alerts_of(watched: Watched | None) -> list[Finding]:
    """Return the alerts that are told with their evidence: what a post-mortem says first."""
    return [] if watched is None else [*watched.post_mortems[:POST_MORTEMS], *watched.alerts[:ALERTS]]


def levels_of_alerts(watched: Watched, worst: Mapping[str, tuple[float, int, int]]) -> dict[str, tuple[int, str]]:
    """Return for each module or parameter how bad it is, as the rules said; those without an alert are as they should be.

    ``worst``: of each the largest ``z``, its step and rank. An alert of NaN names the first series; where it spread is seen.
    """
    levels = dict.fromkeys(worst, (0, LEVELS[0]))
    nonfinite = watched.nonfinite
    for name, (z, step, rank) in worst.items() if nonfinite is not None else ():
        if math.isinf(z) and nonfinite is not None and step >= nonfinite.step:  # what was so before is a mask
            levels[name] = 4, f"NaN or Inf, step {step}, rank {rank}"
    for alert in watched.alerts:
        for series in alert.evidence.get("also") or ():
            _raise(levels, _name_in(series), 1, f"moved with {place_of(alert)}: {rule_of(alert)}")
    for alert in watched.alerts:
        name = _name_in(alert.evidence.get("series"))
        before = levels.get(name, (0, ""))[0]
        level = 4 if alert.sensor == NONFINITE else 3 if before >= 2 else 2
        _raise(levels, name, level, f"{place_of(alert)}: {rule_of(alert)}: {_words(alert)}")
    return levels


def _raise(levels: dict[str, tuple[int, str]], name: str, level: int, said: str) -> None:
    known = levels.get(name)
    if known is not None and level > known[0]:
        levels[name] = level, known[1] if known[0] >= 2 else said


def _name_in(series: object) -> str:
    """Return the name in ``kind/name/slot/metric``; a name may hold a slash, a slot and a metric do not end in one."""
    parts = str(series).split("/")
    return parts[1] if len(parts) > 1 else ""
