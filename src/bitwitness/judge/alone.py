"""The proof where nobody else can be asked: every operator against float64, and compiled code against its operators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bitwitness.judge.fingerprint import Fingerprint
from bitwitness.judge.localize import Located
from bitwitness.judge.oracle import LIMIT, Discrepancy, compare_with_float64
from bitwitness.replay.run import Replayer
from bitwitness.tap.capture import StepRecord
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap
from bitwitness.tap.randomness import RandomState
from bitwitness.tap.trace import OperatorTrace, computes

_FAR_FROM_EAGER = 0.1  # of the whole gradient's norm; fusing kernels changes roundings, and with them no more than that


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


def contradicts_operators(replayer: Replayer, record: StepRecord, compiled: Fingerprint) -> float | None:
    """Return by how much of the whole gradient's norm compiled code and its operators, run eagerly, differ.

    None where that is no more than other roundings explain, or where the step draws random numbers: compiled code draws
    others.
    """
    drew = False

    @contextmanager
    def watch_draws() -> Iterator[None]:
        nonlocal drew
        before = RandomState.read(replayer.device)
        yield
        after = RandomState.read(replayer.device)
        drew |= not torch.equal(before.host, after.host)
        if before.device is not None and after.device is not None:
            drew |= not torch.equal(before.device, after.device)

    eager = Fingerprint.of(replayer.run(record, around=watch_draws))
    if drew:
        return None
    if not torch.equal(compiled.l2.isfinite(), eager.l2.isfinite()):
        return math.inf
    ours, theirs = compiled.l2.nan_to_num(0.0, 0.0), eager.l2.nan_to_num(0.0, 0.0)
    whole = torch.maximum(ours.norm(), theirs.norm())
    gap = float((ours - theirs).abs().max() / whole) if float(whole) else 0.0
    return None if gap <= _FAR_FROM_EAGER else gap
