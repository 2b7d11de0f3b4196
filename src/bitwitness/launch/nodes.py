"""What the launchers of a job's nodes tell one another, by their histories in the job's folder: how an attempt ended elsewhere.

A node whose ranks only saw a connection break cannot know why; that of the killed rank, or of the script's error, does.
Without a shared folder each node decides by what it saw.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitwitness.errors import EXIT_RANK_LOST, UsageError
from bitwitness.launch.ended import End, Ended
from bitwitness.store.launched import launches_in, read_launch
from bitwitness.store.life import life_of

_POLL_S = 0.2
_STOPPED = (End.CONVICTED, End.CORRUPT)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """How another node's attempt ended; ``end`` is None where its launcher is gone, or does not tell."""

    node: str
    end: End | None
    message: str
    certain: bool
    code: int
    trace: int | None = None


def await_others(folder: Path, own: Path, attempt: int, patience_s: float) -> list[Elsewhere]:
    """Return how an attempt ended on the other nodes that took part in it; wait for those that go on.

    Parameters
    ----------
    folder, own
        The job's folder, and this node's history in it.
    attempt
        The attempt's number.
    patience_s
        Seconds to wait; a node that has not told by then is told of as one that does not.

    """
    until = time.monotonic() + patience_s
    while True:
        told = [_told(file, attempt) for file in launches_in(folder) if file != own]
        found = [one for one in told if one is not None]
        if all(one.end is not None for one in found) or time.monotonic() > until:
            return found
        time.sleep(_POLL_S)


def together(mine: Ended, others: Sequence[Elsewhere]) -> Ended:
    """Return why the attempt ended, as all nodes see it; each comes to the same.

    A verdict and a good end stand. A rank that is known to be gone explains errors elsewhere, and an error of the script's
    explains that its ranks are missed.
    """
    others = [one for one in others if one.end is not End.NO_SLOTS]
    traces = [trace for trace in (mine.trace, *(one.trace for one in others)) if trace is not None]
    if mine.end in _STOPPED:  # all go back behind the same step, also where one node has not seen all that was written
        return replace(mine, trace=min(traces, default=None))
    if mine.end in (End.FINISHED, End.USAGE, End.NO_SLOTS, End.APART) or not others:
        return mine
    if all(one.end is End.FINISHED for one in others):
        return Ended(End.APART, mine.code, f"{mine.message}; the other nodes have finished, and do not begin again")
    for one in others:
        if one.end in _STOPPED:
            return Ended(End.LOST, EXIT_RANK_LOST, f"{one.node}: {one.message}", trace=min(traces, default=None))
    if mine.end is End.LOST and mine.certain:
        return mine
    for one in others:
        if one.end is None or (one.end is End.LOST and one.certain):
            return Ended(End.LOST, EXIT_RANK_LOST, f"{one.node}: {one.message}")
    if mine.end is End.FAILED:
        return mine
    failed = [one for one in others if one.end in (End.FAILED, End.USAGE)]
    return Ended(End.FAILED, failed[0].code, f"{failed[0].node}: {failed[0].message}") if failed else mine


def _told(file: Path, attempt: int) -> Elsewhere | None:
    """Return what a history says of an attempt; None where its node took no part in it."""
    with suppress(UsageError, KeyError, TypeError, ValueError):
        found = read_launch(file)
        node = f"node {found['node']}"
        state = life_of(found).state
        rows: list[dict[str, Any]] = [row for row in found["attempts"] if row["number"] == attempt]
        if not rows:
            return None
        end = rows[0].get("end")
        if end is not None:
            row = rows[0]
            said, certain, trace = str(row["message"]), bool(row["certain"]), row["first_trace"]
            return Elsewhere(node, End(end), said, certain, int(row["code"]), None if trace is None else int(trace))
        gone = state in ("killed", "lost", "terminated", "interrupted", "failed")
        said = f"its launcher was {state}" if gone else "its launcher does not tell how its ranks ended"
        return Elsewhere(node, End.LOST if gone else None, said, gone, EXIT_RANK_LOST)
    return None
