"""Under what other conditions two runs were made: evaluation for training, other arguments, parameters in another dtype."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt

from bitwitness.comparison.differences import NEGLIGIBLE, Differences
from bitwitness.comparison.gradients.losses import loss_ratio
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.suspect import Suspect
from bitwitness.oracle.recorded import arguments

_AGREES = 1e-5
"""Relative difference of two losses up to which they are one."""
_MOST = 0.5
"""Share of the parameters in another dtype from which on it is all of them, and not one layer's own."""


def conditions(differences: Differences) -> str:
    """Say what is otherwise in a step before anything is computed: training, arguments, parameters' dtype; or nothing."""
    for pair in differences.alignment.pairs:
        if pair.a.module == "." and (pair.a.kind == "module" or pair.a.op == "loss") and pair.a.phase == "forward":
            frames = (differences.a, pair.a), (differences.b, pair.b)
            flags = [arguments(frame.text("args", node.rows[0])).get("k", {}).get("training") for frame, node in frames]
            if flags in ([True, False], [False, True]):
                return f"run {'AB'[flags.index(False)]} has the model in evaluation mode"
    given_a, given_b = _given(differences.a), _given(differences.b)
    loss = loss_ratio(differences)
    # Whatever only one is given: the loss is the same with it, or was until the runs parted by something else.
    agrees = differences.parted_before or (loss is not None and abs(loss - 1.0) <= _AGREES)
    for names, others, run, other in ((given_a, given_b, "A", "B"), (given_b, given_a, "B", "A")):
        there = set(others.values())  # by position perhaps what the other run gives by name
        more = sorted(name for name in names.keys() - others.keys() if names[name] not in there)
        if others and len(given_a) != len(given_b) and more and not agrees:
            return f"run {run}'s model is given {', '.join(more)}, and run {other}'s is not"
    return _other_parameters(differences)


def without_forward(differences: Differences, rank: int, step: int) -> list[Suspect]:
    """Return the model's call that only one run has in a step, where it has none in the other; all else in it follows."""
    computed = [_has_forward(frame) for frame in (differences.a, differences.b)]
    forwards = [node for node in differences.alignment.lone(first=computed[0]) if node.phase == "forward"]
    if all(computed) or not any(computed) or not forwards:
        return []
    # Seen before, and not because the run ended: else forwards are not recorded there, as inside a transform.
    lacking, before = computed.index(False), differences.earlier.last
    if before is None or not _has_forward(before[lacking]) or "AB"[lacking] in differences.earlier.cut_short:
        return []
    node = next((node for node in forwards if (node.kind, node.module) == ("module", ".")), forwards[0])
    frame = (differences.b, differences.a)[lacking]
    found = Suspect(
        site=f"{node.site}.out0",
        rank=rank,
        step=step,
        reason="missing",
        text=f"run {'AB'[lacking]} has no forward in training mode in this step: was it in evaluation mode?",
        score=math.inf,
        change=math.inf,
        explained=NEGLIGIBLE,
        order=(step, -1),
        side="ba"[lacking],
        stack=int(frame.stack[node.rows[0]]),
        micro=node.micro,
        lone=node,
    )
    return [found]


def _has_forward(frame: StepFrame) -> bool:
    return bool(of_forwards(frame).any())


def of_forwards(frame: StepFrame) -> npt.NDArray[np.bool_]:
    """Return which rows are of operators and modules that ran forward."""
    kinds = frame.texts["kind"]
    found: npt.NDArray[np.bool_] = frame.texts["phase"].equals("forward") & (
        kinds.equals("op") | kinds.equals("module")
    )
    return found


def _given(frame: StepFrame) -> dict[str, tuple[float, ...]]:
    """Return the names of what the model is given in its first call, where that was recorded, and what it holds.

    They go by their places in the call: two may have one name, as ids that are their own labels, or parts of one tensor.
    """
    rows = (
        frame.texts["kind"].equals("module")
        & frame.texts["module"].equals(".")
        & frame.texts["phase"].equals("forward")
    )
    rows &= frame.micro == frame.micro[rows].min(initial=0)
    inputs = [row for row in np.flatnonzero(rows).tolist() if frame.text("name", row).startswith("input ")]
    slots = {row: frame.text("slot", row) for row in inputs}
    return {slot.removeprefix("in."): _held(frame, row) for row, slot in slots.items() if slot.startswith("in")}


def _held(frame: StepFrame, row: int) -> tuple[float, ...]:
    return float(frame.count[row]), *(float(frame.numbers[name][row]) for name in ("min", "max", "mean", "l2"))


def _other_parameters(differences: Differences) -> str:
    found = [differences.dtypes(*pair.outputs[0]) for pair in differences.alignment.pairs if pair.a.kind == "parameter"]
    other = Counter(pair for pair in found if pair[0] != pair[1]).most_common(1)
    if not other or other[0][1] <= _MOST * len(found):
        return ""
    first, second = other[0][0]
    return f"the parameters are {first} in run A and {second} in run B"
