"""Why an attempt ended: what the run folder's verdicts and the ranks' exit codes say together."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bitwitness.errors import EXIT_CONVICTED, EXIT_ELSEWHERE, EXIT_RANK_LOST, EXIT_USAGE, UsageError
from bitwitness.finding import Action, Cause, Device, Event, Finding, Note, Severity, Verdict
from bitwitness.launch.order import Report
from bitwitness.launch.quarantine import key_of
from bitwitness.store.folder import Run


class End(StrEnum):
    """What ended an attempt; ``apart``: the nodes did not meet at all, or the others have ended."""

    FINISHED = "finished"
    CONVICTED = "convicted"
    CORRUPT = "corrupt"
    UNPROVEN = "unproven"
    LOST = "lost"
    FAILED = "failed"
    USAGE = "usage"
    NO_SLOTS = "no_slots"
    APART = "apart"


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an attempt.

    Attributes
    ----------
    end, code
        What it was, and the exit code that goes with it.
    message
        One line.
    devices
        Those that a verdict names.
    certain
        Whether this node saw it, and did not only miss others.
    step, trace
        The step of the verdict, and the first one in which one of its devices was suspected; see `first_trace`.

    """

    end: End
    code: int
    message: str
    devices: tuple[Device, ...] = ()
    step: int | None = None
    trace: int | None = None
    certain: bool = True


def ended_of(report: Report | None, agent_code: int, runs: Sequence[Run]) -> Ended:
    """Return why an attempt ended.

    Parameters
    ----------
    report
        The agent's, as far as it got; None where it ended without one.
    agent_code
        The agent's exit code.
    runs
        The run folders of the attempt.

    """
    events = [event for run in runs for event in events_of(run)]
    stopped = [e for e in events if isinstance(e, Verdict) and e.action is Action.STOPPED]
    if report is not None and report.ended == "finished":
        return Ended(End.FINISHED, 0, "every rank ended well")
    if report is not None and report.ended == "no_slots":
        return Ended(End.NO_SLOTS, EXIT_CONVICTED, _no_slots(report))
    if report is not None and report.ended == "usage":
        return Ended(End.USAGE, EXIT_USAGE, report.message)
    if stopped:  # the verdict is why, whatever else the ranks made of their end
        return _of_verdict(stopped[0], events, alone=report is not None and report.world_size == 1)
    if report is None or not report.ended:
        return Ended(End.LOST, EXIT_RANK_LOST, f"the agent {said(agent_code)}")
    if report.ended == "rendezvous":
        end, what = (End.LOST, "lost one another") if report.ranks else (End.APART, "did not meet")
        return Ended(end, EXIT_RANK_LOST, f"the nodes {what}: {report.message}", certain=False)
    return _of_codes(report)


def _of_verdict(verdict: Verdict, events: Sequence[Event], *, alone: bool) -> Ended:
    trace = first_trace(verdict, events, alone=alone)
    end = End.CONVICTED if verdict.cause is Cause.PERSISTENT_HARDWARE else End.CORRUPT
    message = f"step {verdict.step}: {verdict.cause.replace('_', ' ')}: {verdict.message}"
    return Ended(end, EXIT_CONVICTED, message, verdict.devices, verdict.step, trace)


def _of_codes(report: Report) -> Ended:
    """Return what the exit codes alone say: a rank that is gone explains the others' errors, and not the other way round."""
    codes = report.failures
    for rank, code in codes.items():
        if code < 0 and code != -signal.SIGTERM:
            return Ended(End.LOST, EXIT_RANK_LOST, f"rank {rank} {said(code)}")
    for stop, what in (
        (EXIT_CONVICTED, "stopped by bitwitness, and no run folder tells why"),
        (EXIT_ELSEWHERE, "stopped at an anomaly, unproven"),
    ):
        for rank in [rank for rank, code in codes.items() if code == stop][:1]:
            return Ended(End.UNPROVEN, stop, f"rank {rank} was {what}")
    for rank, code in codes.items():
        if code not in (EXIT_RANK_LOST, -signal.SIGTERM):
            end = End.USAGE if code == EXIT_USAGE else End.FAILED
            return Ended(end, code, f"rank {rank} {said(code)}, as its script or its command line had it")
    told = "".join(f", as rank {rank} tells" for rank in list(codes)[:1])
    return Ended(End.LOST, EXIT_RANK_LOST, f"a rank was lost{told}", certain=False)


def _no_slots(report: Report) -> str:
    names = ", ".join(str(row["device"]) for row in report.left_out) or "none"
    return f"{len(report.slots)} devices of this node are fit, too few (in quarantine: {names})"


def said(code: int) -> str:
    """Say how a process ended; ``code`` as of `subprocess`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def events_of(run: Run) -> Iterable[Event]:
    """Yield what each rank wrote: its own file has all that it told to the others, and the notes besides.

    A file that is damaged, or that a kill cut, is read as far as it goes.
    """
    yield from run.events()
    for rank in run.ranks():
        yield from run.events(rank)


def first_trace(verdict: Verdict, events: Sequence[Event], *, alone: bool) -> int:
    """Return the first step in which one of a verdict's devices was suspected or convicted: state from there on is not trusted.

    A step whose suspicion was dismissed was run again, all of it, with equal bits on another device, and is none. Of a rank
    ``alone`` no other device could speak for it, and every suspicion counts.
    """
    known = {key_of(device) for device in verdict.devices}
    notes = [event for event in events if isinstance(event, Note) and not alone]
    dismissed = {note.step for note in notes if note.evidence.get("cause") == "dismissed"}
    steps = [verdict.since]
    for event in events:
        if isinstance(event, Verdict) and known & {key_of(device) for device in event.devices}:
            steps.append(event.since)
        elif isinstance(event, Finding) and event.severity is not Severity.INFO and event.step not in dismissed:
            steps += [event.step] if event.rank in verdict.ranks or not verdict.ranks else []
    return min(steps)


def runs_of_attempt(folder: Path) -> list[Run]:
    """Return the run folders of an attempt: of several models, and of ranks that the agent had to start anew."""
    found = []
    for path in [folder, *sorted(folder.parent.glob(f"{folder.name}-[0-9]*"))]:
        if path.is_dir():
            with suppress(UsageError, OSError):
                found.append(Run(path))
    return found
