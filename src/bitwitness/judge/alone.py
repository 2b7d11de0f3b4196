"""The proof where nobody else can be asked: every operator of the step against float64, one after the other."""

from __future__ import annotations

import torch

from bitwitness.judge.localize import Located
from bitwitness.judge.oracle import LIMIT, Discrepancy, compare_with_float64
from bitwitness.replay.run import Replayer
from bitwitness.tap.capture import StepRecord
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap
from bitwitness.tap.trace import OperatorTrace, computes


def examine(replayer: Replayer, record: StepRecord, rank: int) -> Located | None:
    """Replay the step and recompute each operator in float64; return the first that is wrong on this device.

    Slow (each operator runs twice more, once in double precision), and only done after a suspicion that no other device
    could answer.
    """
    found: list[tuple[int, OpCall, Discrepancy]] = []
    count = 0

    def check(call: OpCall) -> None:
        nonlocal count
        index, count = count, count + 1
        outputs = [t for t in call.outputs if t.dtype in LIMIT]
        if found or not outputs:
            return
        result = compare_with_float64(call)
        if result.comparable and not result.error <= LIMIT[outputs[0].dtype] and _finite_inputs(call):
            found.append((index, call, result))

    tracker = ModuleTracker()
    replayer.run(record, around=lambda: OperatorTap(tracker, check, computes))
    if not found:
        return None
    index, call, result = found[0]
    close = OperatorTrace(keep=index)
    replayer.run(record, around=close.tap)
    return Located(str(call.site()), close.line, rank, {f"rank {rank}": result.as_dict()})


def _finite_inputs(call: OpCall) -> bool:
    tensors = [t for t in call.args if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return all(bool(torch.isfinite(t).all()) for t in tensors)
