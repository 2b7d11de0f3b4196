"""The proof where nobody else can be asked: every operator against float64, and compiled code against its operators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from bitwitness.capture.randomness import RandomState
from bitwitness.capture.step import StepRecord
from bitwitness.judge.fingerprint import Fingerprint
from bitwitness.judge.localize import Located
from bitwitness.oracle.limits import LIMIT
from bitwitness.oracle.live import OVERFLOWS, Discrepancy, compare_with_float64
from bitwitness.oracle.names import canonical
from bitwitness.replay.run import Replayer
from bitwitness.sense.flops import flops_of
from bitwitness.stats.local import local_values
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap
from bitwitness.tap.trace import OperatorTrace, computes, copied

# Shares of the whole gradient's norm by which compiled code may differ from its operators, run one by one. Fusing kernels
# changes roundings: twice what bfloat16 kernels are allowed (`fingerprint.NEAR`), for they fuse whole chains of them.
_FAR_FROM_EAGER = 0.1
# The same where the step draws random numbers, of which compiled code draws others: only a gradient ten times as large, or a
# tenth, is then no draw's doing. What lies between is not seen.
_FAR_FROM_OTHER_DRAWS = 0.9

_MASKED = frozenset({"softmax", "log_softmax", "safe_softmax", "logsumexp", "add", "where", "masked_fill"})
"""Operators that have a right answer where a mask has filled what is not to be seen with negative infinity."""


@dataclass(frozen=True, slots=True)
class Examined:
    """An execution whose operators were compared with float64: the first that is wrong, if any, and its gradients."""

    located: Located | None
    fingerprint: Fingerprint


def examine(
    replayer: Replayer, record: StepRecord, rank: int, *, unchecked: set[str] | None = None, together: bool = False
) -> Examined:
    """Replay the step and recompute each operator in float64.

    Slow (each operator runs twice more, once in double precision), and only done after a suspicion that no other device
    could answer.

    Parameters
    ----------
    replayer, record, rank
        The step, what runs it again, and whose device that is.
    unchecked
        Gets the names of operators that do the step's work and that float64 could not judge (recurrent layers, say).
    together
        Other ranks do the same at the same time: run as often as they do, whatever is found.

    """
    check = _OperatorCheck()
    tracker = ModuleTracker()
    run = replayer.run(
        record, around=lambda: OperatorTap(tracker, check.compare, computes, before=check.keep_arguments)
    )
    if unchecked is not None:
        unchecked |= check.unchecked
    # Where ranks exchange something in a replay, all run it equally often.
    found = check.found
    index = -1 if found is None else found[0]  # -1 keeps none
    close = OperatorTrace(keep=index)
    if found is not None or together:
        replayer.run(record, around=close.tap)
    located = None
    if found is not None:
        located = Located(str(found[1].site()), close.line, rank, {f"rank {rank}": found[2].as_dict()})
    return Examined(located, Fingerprint.of(run))


class _OperatorCheck:
    """Compares each operator of one replay with float64, up to the first that is wrong."""

    def __init__(self) -> None:
        self.found: tuple[int, OpCall, Discrepancy] | None = None
        self.unchecked: set[str] = set()
        self._count = 0
        self._kept: Any = None

    def keep_arguments(self, call: OpCall) -> None:
        """Copy the arguments of an operator that changes them."""
        mutable = self.found is None and call.func._schema.is_mutable
        self._kept = (copied(call.args), copied(call.kwargs)) if mutable else None

    def compare(self, call: OpCall) -> None:
        """Compare a call that has just run."""
        index, self._count = self._count, self._count + 1
        # Results in integers have no limit that a device could be held to.
        if self.found is not None or not any(t.dtype in LIMIT for t in call.outputs):
            return
        if self._kept is not None:
            call = replace(call, args=self._kept[0], kwargs=self._kept[1])
        result = compare_with_float64(call)
        if not _finite_inputs(call, masked=canonical(call.op) in _MASKED):
            return  # what made them is at fault, if anything, not this one
        if result.outside:
            self.found = index, call, result
        elif not result.comparable and result.reason != OVERFLOWS and flops_of(call):
            self.unchecked.add(call.op)


def _finite_inputs(call: OpCall, *, masked: bool) -> bool:
    """Return whether a call reads finite numbers, or, where values may be ``masked``, negative infinities beside them."""
    tensors = [local_values(t) for t in call.args if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return all(bool((t.isfinite() | (t.isneginf() if masked else False)).all()) for t in tensors)


def contradicts_operators(replayer: Replayer, record: StepRecord, compiled: Fingerprint) -> float | None:
    """Return by how much of the whole gradient's norm compiled code and its operators, run eagerly, differ.

    None where that is no more than other roundings explain or, where the step draws random numbers, other draws.
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
    if not torch.equal(compiled.l2.isfinite(), eager.l2.isfinite()):
        return math.inf
    ours, theirs = compiled.l2.nan_to_num(0.0, 0.0), eager.l2.nan_to_num(0.0, 0.0)
    whole = torch.maximum(ours.norm(), theirs.norm())
    gap = float((ours - theirs).norm() / whole) if float(whole) else 0.0
    return None if gap <= (_FAR_FROM_OTHER_DRAWS if drew else _FAR_FROM_EAGER) else gap
