"""Which of all suspects of two runs is the first, which come after it, and the lines of the user's code that called them."""

from __future__ import annotations

from bitwitness.comparison.gradients.cause import OF_ALL_GRADIENTS
from bitwitness.comparison.report import Report
from bitwitness.comparison.suspect import Suspect, grouped, regrouped_last
from bitwitness.store.source import Source

LISTED = 200
"""Insertions and suspects that are kept."""


def _received(one: Suspect, suspects: list[Suspect]) -> bool:
    """Return whether a rank got its difference from another, where one is named: by a collective that both take part in."""
    reduced = one.reason == "edited" and one.site.endswith(":grad.reduced")
    if one.reason != "unknown" and not reduced:
        return False
    named = (other for other in suspects if other.reason not in ("unknown", "edited"))
    return any(other.rank != one.rank and other.step <= one.step for other in named)


def without_received(suspects: list[Suspect]) -> list[Suspect]:
    """Return suspects but for those of ranks that only received their difference.

    They may come first in the order, and would hide who sent it.
    """
    return [one for one in suspects if not _received(one, suspects)]


def conclude(report: Report) -> None:
    """Choose the first; rank the rest."""
    if not report.suspects and not report.exceeding and report.unexplained is not None:
        report.exceeding.append(report.unexplained)  # handed on by something, of which nothing was found
    suspects = sorted(report.suspects, key=lambda suspect: (suspect.order, suspect.rank))
    suspects = regrouped_last(suspects)
    report.cause = next((one for one in suspects if one.reason in OF_ALL_GRADIENTS), None)
    suspects = grouped(suspects)
    report.first = suspects[0] if suspects else None
    report.parting = next((s for s in suspects if s.clean), None)
    first = suspects[:1]
    rest = sorted(suspects[1:], key=lambda suspect: -suspect.score)
    report.suspects = [*first, *rest][:LISTED]


def name_lines(suspects: list[Suspect], a: Source, b: Source) -> None:
    """Give each suspect the line of the user's code that called it."""
    stacks: dict[tuple[str, int], dict[int, str]] = {}
    for suspect in suspects:
        side = "b" if suspect.side == "b" else "a"
        if (side, suspect.rank) not in stacks:
            stacks[side, suspect.rank] = (b if side == "b" else a).stacks(suspect.rank)
        suspect.line = stacks[side, suspect.rank].get(suspect.stack, "").partition("\n")[0]
