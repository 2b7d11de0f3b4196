"""The `twice` sensor: an operator of a deep step that no identity is known of, computed again from the same inputs.

It sees what comes out otherwise, down to the last bit: a fault that strikes once, or now and then. One that always strikes
alike gives the same again; that is left to those who compare with what must be, with other devices or with history. Small
operators are computed again on every deep step, large ones by turns, since this costs what they cost.

On a CPU a third execution tells at once whether the operator repeats its bits at all, while its inputs are there, and float64
says whether rounding explains what came out first: if not, that is proof. On an accelerator, which is not waited for, an
operator has to have repeated them for a while, and one whose differences experiments do not explain is left alone: kernels that
add atomically do not repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bitwitness.finding import Finding, Severity
from bitwitness.oracle.defined import defined_results
from bitwitness.oracle.eligible import draws, is_unique
from bitwitness.oracle.live import Discrepancy, compare_with_float64
from bitwitness.sense.flops import carries_flops, flops_of
from bitwitness.sense.selftest import seen, self_test
from bitwitness.site import Site
from bitwitness.stats.digest import flat_bits
from bitwitness.stats.host import numbers_of
from bitwitness.stats.local import is_plain
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap, tensors_in
from bitwitness.tap.ownwork import own_work
from bitwitness.tap.threads import working_elsewhere
from bitwitness.tap.turns import Turns, is_small

_WRITE_STATISTICS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Operators that write to their fourth and fifth arguments, running statistics, which their schemas do not say."""
_UNREPEATED = ("_batch_norm_impl_index", "_cudnn_rnn", "miopen_rnn", "_unsafe_view", "from_file", "equal", "is_nonzero")
"""Operators that write to more than that, read what is not given, show memory, or wait for a device."""
_BEGINNINGS = ("_local_scalar_dense", "item", "_pin_memory", "record_stream", "_assert", "empty", "new_empty")
_LITTLE_WORK = 1 << 22
"""Floating-point operations up to which a convolution or a recurrent layer counts as small."""
_REPEATS = 8
"""Comparisons that an operator on an accelerator has to pass before one that differs is believed."""
_STRIKES = 2
_LIMIT = 16  # findings a step


@cache
def is_repeatable(func: OpOverload) -> bool:
    """Tell whether an operator of torch's may be computed again: it writes nothing, allocates or shows nothing alone."""
    name = func.overloadpacket.__name__
    if func.namespace != "aten" or func._schema.is_mutable or not is_unique(func):
        return False
    returns = func._schema.returns
    if not returns or any(value.alias_info is not None for value in returns):
        return False
    return name not in _UNREPEATED and not name.startswith(_BEGINNINGS)


@dataclass(slots=True)
class _Known:
    """What is known of one kind of operator on one kind of device."""

    same: int = 0
    strikes: int = 0

    @property
    def off(self) -> bool:
        return self.strikes >= _STRIKES


@dataclass(frozen=True, slots=True)
class _Pending:
    """A comparison whose result is still on the device: where, and by result its dtype and shape, but no tensor of the call."""

    sites: tuple[Site, ...]
    key: str
    results: tuple[str, ...]
    differ: Tensor
    proof: Discrepancy | None


@dataclass(slots=True)
class TwiceSensor:
    """Handler for `bitwitness.tap.operators.OperatorTap`; ``drain`` turns what it noted into findings.

    Parameters
    ----------
    one_in
        Of the large operators one in so many is computed again on a step, by turns.

    """

    one_in: int = 8
    elsewhere: Callable[[], str | None] = working_elsewhere
    """Names another thread of the script's that works, and may have changed the inputs meanwhile."""
    share: int = 1
    """Of all operators one in so many, as the plan of deep steps says."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls that were computed again, by operator."""
    _known: dict[str, _Known] = field(default_factory=dict)
    _pending: list[_Pending] = field(default_factory=list)
    _turns: Turns = field(default_factory=Turns)

    def select(self, func: OpOverload) -> bool:
        """Return whether an operator may be computed again."""
        return is_repeatable(func)

    def __call__(self, call: OpCall) -> None:
        """Compute a call again that nothing else has checked; on an accelerator, without waiting for it."""
        if call.checked or not call.outputs or not self._has_turn(call):
            return
        outputs, given = _results(call), tensors_in((*call.args, *call.kwargs.values()))
        if not outputs or not given or not all(map(is_plain, given)) or draws(call.func, call.args, call.kwargs):
            return
        key = f"{call.op} on {outputs[0].device.type}"
        known = self._known.setdefault(key, _Known())
        if known.off:
            return
        if call.op in _WRITE_STATISTICS:
            call = replace(call, args=tuple(_copy(a) if i in (3, 4) else a for i, a in enumerate(call.args)))
        proof, differ = None, _differing(outputs, _again(call))
        if outputs[0].is_cpu and bool(differ.any()):
            again = _again(call)
            if bool(_differing(again, _again(call)).any()):
                known.strikes = _STRIKES  # it does not repeat its bits
                return
            if self.elsewhere() is not None:
                return
            known.same, proof = _REPEATS, compare_with_float64(call)
        self.calls[call.op] += 1
        sites = tuple(call.site(f"out{index}") for index in range(len(outputs)))
        shapes = tuple(f"{str(out.dtype).removeprefix('torch.')} {list(out.shape)}" for out in outputs)
        self._pending.append(_Pending(sites, key, shapes, differ, proof))

    def _has_turn(self, call: OpCall) -> bool:
        if self._turns.is_among_many(call.op):
            return False
        small = is_small(call.outputs) and not (carries_flops(call.func) and flops_of(call) > _LITTLE_WORK)
        return self._turns.has_one(self.share * (1 if small else self.one_in))

    def drain(self, step: int, rank: int) -> list[Finding]:
        """Return what came out otherwise since the last time; waits for each device once."""
        pending, self._pending = self._pending, []
        self._turns.next_step()
        found = []
        told = iter(numbers_of([count for noted in pending for count in noted.differ]))
        for noted in pending:
            counts = list(islice(told, len(noted.sites)))
            known = self._known[noted.key]
            if not any(counts):
                known.same += 1
            elif known.same < _REPEATS:
                known.same, known.strikes = 0, known.strikes + 1
            elif not known.off:
                found.append(_finding(noted, counts, step, rank))
        return found[:_LIMIT]

    def dismissed(self, findings: list[Finding]) -> None:
        """Mind that experiments found no fault behind some findings of this sensor."""
        for key in {str(f.evidence["operator"]) for f in findings if f.sensor == "twice"}:
            self._known[key].strikes += 1
            self._known[key].same = 0

    def coverage(self) -> dict[str, Any]:
        """Return what was computed again, and which operators do not repeat their bits."""
        off = sorted(key for key, known in self._known.items() if known.off)
        return {"calls": sum(self.calls.values()), "operators": len(self.calls), "do_not_repeat": off}


def _results(call: OpCall) -> list[Tensor]:
    """Return the results that are compared."""
    return [out for out in defined_results(call) if is_plain(out)]


def _again(call: OpCall) -> list[Tensor]:
    """Return the results of a second execution.

    It is made in the operator's own place, so that a device whose kernel fails there may fail again; gradients stay on or off
    as they are, by which some kernels are chosen.
    """
    with own_work(call.module, call.phase, call.call):
        return _results(replace(call, result=call.func(*call.args, **call.kwargs)))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _differing(one: list[Tensor], other: list[Tensor]) -> Tensor:
    """Return by result in how many elements the bits differ, int64 on their device; -1 where the shapes do."""
    counts = []
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            counts.append(torch.full((), -1, dtype=torch.int64, device=a.device))
        elif a.is_cpu and torch.equal(flat_bits(a), flat_bits(b)):
            counts.append(torch.zeros((), dtype=torch.int64))
        else:
            counts.append((flat_bits(a) != flat_bits(b)).sum())
    return torch.stack(counts)


def _finding(noted: _Pending, counts: list[int], step: int, rank: int) -> Finding:
    first = next(index for index, count in enumerate(counts) if count)
    site, count = noted.sites[first].at(rank=rank, step=step), counts[first]
    evidence = {"kind": "computed twice", "operator": noted.key, "elements": count, "result": noted.results[first]}
    message = (
        f"{site.short} gave other bits when it was computed again from the same inputs: "
        f"{count} element{'s' * (count != 1)} of {noted.results[first]}"
    )
    if noted.proof is None or not noted.proof.outside:
        message += "; one of the two executions was wrong, and re-execution of the step tells which"
        return Finding("twice", site, Severity.WARNING, message, evidence, step, rank)
    evidence |= {"element": noted.proof.at, "value": noted.proof.value, "expected": noted.proof.expected}
    message += f"; element {noted.proof.at} was {noted.proof.value:.6g}, float64 gives {noted.proof.expected:.6g}"
    return Finding("twice", site, Severity.ERROR, message, evidence, step, rank)


@self_test("twice", "operators without an identity that come out otherwise when they are computed again, on deep steps")
def _proof() -> str:
    found: list[list[Finding]] = []
    for spoil in (False, True):
        sensor = TwiceSensor(elsewhere=lambda: None)

        def check(call: OpCall, sensor: TwiceSensor = sensor, spoil: bool = spoil) -> None:
            if spoil:
                call.result[5] *= 1 + 2.0**-20
            sensor(call)

        with torch.no_grad(), OperatorTap(ModuleTracker(), check, sensor.select):
            torch.sigmoid(torch.linspace(-1.0, 1.0, 64, dtype=torch.float32))
        found.append(sensor.drain(0, 0))
    return seen(*found)
