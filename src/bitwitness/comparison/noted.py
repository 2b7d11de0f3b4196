"""What no single operator did as a suspect: what happened to all gradients, and what only one run has of its parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from bitwitness.comparison.differences import NEGLIGIBLE, Differences
from bitwitness.comparison.gradients.absent import Absence
from bitwitness.comparison.gradients.cause import OF_ALL_GRADIENTS, Cause
from bitwitness.comparison.gradients.dropped import adds_up
from bitwitness.comparison.gradients.scalers import is_scalers
from bitwitness.comparison.gradients.underflow import is_in_backward
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


def cause_first(suspects: list[Suspect], differences: Differences) -> list[Suspect]:
    """Return a step's suspects without what only looks like a cause beside that of all gradients.

    Where a module is written otherwise in each run, its backward's operators read other tensors, and are no counterparts.
    """
    if not any(one.reason in OF_ALL_GRADIENTS for one in suspects):
        return suspects
    if any(one.reason == "dropped" for one in suspects):
        suspects = [one for one in suspects if not adds_up(one)]
    if any(one.reason == "clipped" for one in suspects):  # of what is not unscaled, perhaps
        suspects = [one for one in suspects if not is_scalers(differences, one)]
    if any(one.reason == "underflow" for one in suspects):
        suspects = [one for one in suspects if not is_in_backward(one)]
    lone = [node for first in (True, False) for node in differences.alignment.lone(first=first)]
    written = {node.module for node in lone if (node.kind, node.phase) == ("op", "forward")}
    return [one for one in suspects if not (one.reason == "view" and _is_backward_in(one, written))]


def _is_backward_in(suspect: Suspect, modules: set[str]) -> bool:
    pair = suspect.pair
    return pair is not None and pair.a.phase == "backward" and pair.a.module in modules


def in_recomputation(suspect: Suspect) -> Suspect:
    """Say of a suspect that it is computed again for the backward, under activation checkpointing, if it is."""
    if suspect.node is None or not suspect.node.recomputed:
        return suspect
    return replace(suspect, text=f"{suspect.text} (in the recomputation of activation checkpointing)")
