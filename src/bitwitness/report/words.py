"""One sentence for whoever decides: what a run's health, or a comparison, means for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwitness.finding import Action, Cause, Verdict
from bitwitness.report.alerts import headline_of_watched
from bitwitness.report.clean import text
from bitwitness.store.answer import Answer

if TYPE_CHECKING:  # a comparison needs torch, and a report of one run does not
    from bitwitness.comparison.report import Report

NOT_JUDGED = "not judged"
NOTHING = "Nothing has to be done."
_DONE = {
    Action.HEALED: "it was noticed before the wrong numbers were used, and put right",
    Action.SKIPPED: "the step was left out, so that the wrong numbers were not used",
    Action.STOPPED: "the run was stopped before the wrong numbers were used",
    Action.REPORTED: "it was only reported: the wrong numbers are in the model from that step on",
}


def headline_of(answer: Answer) -> str:
    """Return what is concluded of a run: the same status as `bitwitness status` gives, in words that need no other."""
    said, ended = _concluded(answer), ended_of(answer)
    if not ended:
        return said
    return (
        f"{said} {ended}" if answer.health.status == "findings" else f"{ended} Until then: {said[:1].lower()}{said[1:]}"
    )


def ended_of(answer: Answer) -> str:
    """Say how a run ended that came neither to its end nor to a verdict's; empty for any other."""
    by = f" ({text(answer.life.by, 300)})" if answer.life.by else ""
    match answer.life.state:
        case "failed":
            return f"The script failed{by}."
        case "interrupted" | "terminated":
            return f"The run was {answer.life.state}{by}."
    return ""


def _concluded(answer: Answer) -> str:
    health, watched = answer.health, answer.watched
    if health.worst is not None:
        return _of_verdict(health.worst, len(answer.verdicts) - 1)
    if any(table.get("nonfinite") and table["nonfinite"].get("bad") for table in answer.tables):
        return "The training made numbers that are none (NaN or Inf); where they come from is named below."
    if any(table.get("stopped_at") for table in answer.tables):
        return "A number looked wrong and the run was stopped; what was wrong is not proven."
    if watched is not None and watched.found:
        return headline_of_watched(watched)
    if health.status == "unread":
        return "It is not known whether this run's numbers are true: not everything was looked at, settled or readable."
    still = " It is still running." if answer.life.state == "running" else ""
    if answer.tables:
        return f"Nothing is wrong with this run's numbers, as far as they were looked at.{still}"
    if watched is not None and not answer.recorded:
        return f"{headline_of_watched(watched)}{still}"
    return f"Nobody judged this run's numbers while it ran: it was recorded, and what was recorded is whole.{still}"


def _of_verdict(verdict: Verdict, more: int) -> str:
    """Say who is to blame, when, and what was done."""
    who = " and ".join(f"rank {rank}" for rank in verdict.ranks[:4]) or "a rank that is not known"
    at = f"at step {verdict.step}"
    done = _DONE[verdict.action]
    match verdict.cause:
        case Cause.TRANSIENT_HARDWARE:
            said = f"The device of {who} computed wrongly once, {at}; {done}"
        case Cause.PERSISTENT_HARDWARE:
            said = f"The device of {who} computes wrongly, first seen {at}; {done}"
        case Cause.CORRUPT_STATE:
            since = f", and are so since before step {verdict.since}" if verdict.since < verdict.step else ""
            said = f"The weights or other state of {who} were found corrupt {at}{since}; {done}"
        case Cause.SOFTWARE:
            said = f"The program computes wrongly {at}, and the hardware is not to blame; {done}"
        case Cause.DATA:
            said = f"The data of step {verdict.step} are to blame, and not the hardware; {done}"
        case _:
            said = f"Something was wrong {at}, and who is to blame could not be proven"
    others = f"; {more} more verdict{'s' * (more > 1)} below" if more > 0 else ""
    return f"{said}{others}."


def headline_of_pair(report: Report) -> str:
    """Return what is concluded of two runs."""
    if report.status == "unread" and report.first is None:
        return "The two runs could not be compared as a whole; why is said below."
    if report.first is not None:
        first = report.first
        side = {"a": " only run A has", "b": " only run B has"}.get(first.side, "")
        where = f"in step {first.step} on rank {first.rank}, in {text(first.site, 120)}"
        return (
            f"The two runs are not equal: they part {where}{f', which{side}' if side else ''}: {text(first.text, 400)}."
        )
    if report.exceeding:
        return "The two runs differ by more than rounding explains; what made the difference was not recorded."
    if not report.differing:
        return "The two runs are equal in all that was compared."
    return "The two runs differ by rounding only: they computed the same."


def to_do_of_pair(report: Report) -> list[str]:
    """Return what to do about it, the nearest first."""
    first = report.first
    if first is not None:
        line = f"Look at {text(first.line, 300)}, where the first wrong operator is called." if first.line else ""
        told = {
            "computed": "One of the two computed it wrongly by float64: suspect its device or its kernel, and run it again.",
            "argument": "Make the arguments of the operator equal in both runs.",
            "dtype": "Make the dtype of the operator equal in both runs.",
        }.get(first.reason, "Make both runs do the same there, record again, and compare again.")
        return [one for one in (line, told) if one]
    if report.problems or report.unaligned:
        return [
            "Look at what could not be read or compared, below; record both with the same batches, and compare again."
        ]
    if report.exceeding:
        return [
            "Record more of what lies before the first difference (--content tensors, all operators), and compare again."
        ]
    return [NOTHING]


def word_of(answer: Answer) -> str:
    """Return how a run is called that is fine and yet not healthy without more words; empty for any other."""
    if ended := ended_of(answer):
        return ended.partition(" (")[0].rstrip(".").lower()
    if answer.tables or answer.life.state == "running":
        return ""
    if answer.watched is not None and answer.watched.rules:
        return ""
    return NOT_JUDGED


def nothing_found(answer: Answer) -> str:
    """Say what to do where nothing that was found asks for anything."""
    if answer.health.status != "fine":
        return "Read why not everything is known, below."
    if answer.life.state == "failed":
        return "See why the script failed; its numbers gave no sign of it."
    return NOTHING
