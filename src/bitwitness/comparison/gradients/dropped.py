"""Micro-batches whose gradients are gone before the optimizer steps: the last one's alone are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.chains import Chain
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.matching.tokens import CASTS
from bitwitness.comparison.suspect import Suspect
from bitwitness.oracle.names import canonical

LAST_ALONE = "last_alone"
"""Under which a table's metadata tell `keeps_last_alone`, where micro-batches were put together."""
_ADDS = "add"
_APART = 1e-3
"""Relative change of a gradient that is more than rounding leaves."""
_MOST = 0.9
"""Share of the gradients that has to be made in one way."""


def keeps_last_alone(frame: StepFrame) -> bool:
    """Tell whether of several micro-batches the gradients are those that the last one's backward made, to which none was added.

    False also where operators were not recorded, or something else than a backward made the gradients (a reduction).
    """
    if (told := (frame.table.schema.metadata or {}).get(LAST_ALONE.encode())) is not None:
        return bool(told == b"1")
    of_ops = frame.texts["kind"].equals("op") & frame.texts["phase"].equals("backward")
    micros = np.unique(frame.micro[of_ops])
    if len(micros) < 2:
        return False
    by_number = {node.number: node for node in frame.nodes if node.kind == "op" and node.phase == "backward"}
    complete = frame.texts["kind"].equals("gradient") & frame.texts["slot"].equals("reduced")
    makers = [_behind_casts(frame, by_number, int(number)) for number in frame.producer[complete]]
    last = [m for m in makers if m is not None and m.micro == micros[-1] and canonical(m.op) != _ADDS]
    return len(makers) > 1 and len(last) >= _MOST * len(makers)


def _behind_casts(frame: StepFrame, nodes: Mapping[int, Node], number: int) -> Node | None:
    """Return what made a gradient: behind a cast, for under autocast two micro-batches may share the copy of a weight."""
    node = nodes.get(number)
    while node is not None and node.op in CASTS and node.inputs:
        node = nodes.get(int(frame.producer[node.inputs[0]]))
    return node


def last_alone(differences: Differences, chains: Sequence[Chain]) -> str:
    """Say that the optimizer of one run reads the last micro-batch's gradients alone, if that is so."""
    a, b = differences.a, differences.b
    last = [keeps_last_alone(frame) for frame in (a, b)]
    rows = [chain.a[1] for chain in chains]
    if last[0] == last[1] or not any(row is not None and differences.change_of[row] > _APART for row in rows):
        return ""
    run, micros = ("A", a.micros) if last[0] else ("B", b.micros)
    return (
        f"the gradients of run {run} are those of the last of its {micros} micro-batches alone: the others' are not added "
        "to them (zero_grad, or a new backward's gradients put in their place, between the micro-batches)"
    )


def adds_up(suspect: Suspect) -> bool:
    """Tell whether a suspect is that only one run adds a micro-batch's gradient to the others'."""
    return suspect.lone is not None and suspect.lone.phase == "backward" and canonical(suspect.lone.op) == _ADDS
