"""What the launcher orders of an agent, and what the agent reports: two JSON files in a private folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.files.reading import read_object
from bitwitness.files.writing import write_text


@dataclass(frozen=True, slots=True)
class Order:
    """One attempt at the job on this node.

    Attributes
    ----------
    attempt
        Its number, from 1 on; the agents of all nodes of one attempt meet under it.
    ranks, spares, least
        Ranks wanted on this node, devices kept for them, and the fewest ranks to begin with.
    quarantine
        The file of the list.
    options
        torchrun's, as they were given.
    command
        What each rank runs: a program, or with ``module`` a module's name, and its arguments.
    python, module
        Whether ``command`` begins with a script or a module for this interpreter, and which.
    environment
        Variables of the ranks.
    join_s
        Seconds that this node waits for the others.
    keep_for
        Nothing is to be run, but the meeting place kept, if it is on this host, while a launcher lives whose history is here.

    """

    attempt: int
    ranks: int
    spares: int
    least: int
    quarantine: str
    options: list[str]
    command: list[str]
    python: bool
    module: bool
    environment: dict[str, str]
    join_s: float
    keep_for: str = ""


@dataclass(slots=True)
class Report:
    """How the attempt went.

    Attributes
    ----------
    slots
        The devices that the ranks were put on, by local rank; `bitwitness.launch.slots.Slot.to_dict`.
    left_out
        Those of this node in quarantine.
    ranks, world_size
        The numbers of this node's ranks in the job, and the job's size; nothing where none was started.
    failures
        Exit code, negative where a signal ended it, of each rank that failed, in the order of their ends.
    ended
        ``finished``; ``failed``: ranks failed; ``no_slots``: too few devices are fit; ``rendezvous``: the nodes did not meet,
        or lost one another; ``usage``: the order cannot be followed.
    message
        One line about what went wrong, if anything did.

    """

    ended: str = ""
    message: str = ""
    slots: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    world_size: int = 0
    failures: dict[int, int] = field(default_factory=dict)


def write_order(path: Path, order: Order) -> None:
    """Write an order."""
    write_text(path, json.dumps(asdict(order)), mode=0o600)


def read_order(path: Path) -> Order:
    """Read an order."""
    return Order(**read_object(path, "an order of bitwitness launch"))


def write_report(path: Path, report: Report) -> None:
    """Write a report."""
    write_text(path, json.dumps(asdict(report)), mode=0o600)


def read_report(path: Path) -> Report | None:
    """Read a report; None where the agent ended without one, or in the midst of it."""
    try:
        found = read_object(path, "an agent's report")
        found["failures"] = {int(rank): int(code) for rank, code in found["failures"].items()}
        return Report(**found)
    except (UsageError, KeyError, TypeError, ValueError, AttributeError):
        return None
