"""Where a non-finite value came from, when every execution gives it: positive evidence for data or software."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bitwitness.replay.run import Replayer
from bitwitness.tap.capture import StepRecord
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap, tensors_in
from bitwitness.tap.structure import tensors_of
from bitwitness.tap.trace import OperatorTrace, computes

_MASKS = (
    "fill",
    "where",
    "full",
    "scalar_tensor",
    "constant",
    "clamp",
)  # they put in the infinity that they are given


@dataclass(frozen=True, slots=True)
class Origin:
    """The first operator that made NaN or Inf from finite inputs, in its printable site, and the user's line."""

    site: str
    line: str


def bad_inputs(record: StepRecord) -> bool:
    """Tell whether the captured batch itself holds NaN or Inf."""
    tensors = [t for forward in record.forwards for t in tensors_of((forward.args, forward.kwargs))]
    return any(not bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point())


def find_origin(replayer: Replayer, record: StepRecord) -> Origin | None:
    """Replay the step and return the first operator whose output is non-finite although its inputs are finite."""
    found: list[tuple[int, str]] = []
    count = 0

    def check(call: OpCall) -> None:
        nonlocal count
        index, count = count, count + 1
        if found or any(part in call.op for part in _MASKS):
            return
        inputs = [t for t in tensors_in([*call.args, *call.kwargs.values()]) if t.is_floating_point()]
        outputs = [t for t in call.outputs if t.is_floating_point()]
        if inputs and not _finite(outputs) and _finite(inputs):
            found.append((index, call.site().short))

    tracker = ModuleTracker()
    replayer.run(record, around=lambda: OperatorTap(tracker, check, computes))
    if not found:
        return None
    index, site = found[0]
    if replayer.lockstep:
        return Origin(site, "")  # the line would take one more run, in which the other ranks take no part
    close = OperatorTrace(keep=index)
    replayer.run(record, around=close.tap)
    return Origin(site, close.line)


def _finite(tensors: list[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t.detach()).all()) for t in tensors)
