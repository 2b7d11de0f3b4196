"""What no single operator did as a suspect: what happened to all gradients, and what only one run has of its parameters."""

from __future__ import annotations

import math

import numpy as np

from bitwitness.comparison.absent import Absence
from bitwitness.comparison.differences import NEGLIGIBLE, Differences
from bitwitness.comparison.gradients import Cause
from bitwitness.comparison.suspect import Suspect

_SLOTS = {"backward": "local", "reduced": "reduced", "read": "read"}


def of_cause(cause: Cause, rank: int, step: int) -> Suspect:
    """Return what happened to all gradients as a suspect."""
    times = abs(cause.times) if cause.times > 0 else 1.0
    change = abs(1.0 - times) if times != 1.0 else 2.0
    return Suspect(
        site=f"./gradients#0:grad.{_SLOTS[cause.stage]}",
        rank=rank,
        step=step,
        reason=cause.kind,
        text=cause.text,
        score=change / NEGLIGIBLE,
        change=change,
        explained=NEGLIGIBLE,
        order=(step, cause.row),
        side=cause.side,
        stack=cause.stack,
    )


def of_absence(absence: Absence, differences: Differences, rank: int, step: int) -> Suspect:
    """Return what only one run has as a suspect.

    A parameter of its own comes before all that is computed; a gradient or an update that is not there before the backward,
    whose other differences follow from it.
    """
    node = absence.nodes[0]
    frame = differences.a if absence.side == "A" else differences.b
    backward = np.flatnonzero(differences.a.texts["phase"].equals("backward"))
    row = int(backward[0]) - 1 if len(backward) else differences.a.size
    return Suspect(
        site=f"{node.site}.{frame.text('slot', node.rows[-1])}",
        rank=rank,
        step=step,
        reason="missing",
        text=absence.text,
        score=math.inf,
        change=math.inf,
        explained=NEGLIGIBLE,
        order=(step, -1 if absence.structural else row),
        side=absence.side.lower(),
    )
