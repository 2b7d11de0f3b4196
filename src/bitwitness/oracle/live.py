"""A call that has just run, recomputed on its device and in float64: the proof where no other device can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bitwitness.oracle.defined import defined_results, is_wholly_defined, with_padding_filled
from bitwitness.oracle.eligible import draws, is_torchs, is_unique
from bitwitness.oracle.float64 import run_in_float64
from bitwitness.oracle.limits import LIMIT, SINGLE, cancelled, limit_of, may_overflow, summed_in_place, underflow
from bitwitness.oracle.terms import term_sizes
from bitwitness.oracle.worst import gaps
from bitwitness.stats import same_bits
from bitwitness.stats.local import local_values
from bitwitness.tap.operators import OpCall, tensors_in
from bitwitness.tap.ownwork import REFERENCE, own_work
from bitwitness.tap.trace import copied

_STATEFUL = (
    "an operator that is not torch's, and gave other bits the second time: it may depend on more than its arguments"
)
_LONGEST_REASON = 200  # characters: torch's messages may hold whole schemas
OVERFLOWS = "its inputs are large enough to overflow"
"""Why a result that is not finite is not compared."""


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """How far an operator's result is from float64's.

    ``error``: L2 distance of the whole result relative to float64's L2 (or to a share of its terms' size, if the result
    cancels to less: see `limits.cancelled`); ``single``: the same of the worst element,
    beside its size and the usual one; ``at``: flat index of the worst element of the output that is furthest off;
    ``value`` and ``expected``: the device's and float64's number there. ``allowed``: the error that the coarsest dtype among
    inputs and results allows (a kernel may compute in it). ``comparable``: the operator could be run in float64; else
    ``reason`` says why not. ``repeats``: running it once more on its device gave the same bits as ``value``'s result.
    """

    comparable: bool
    error: float = 0.0
    single: float = 0.0
    allowed: float = 0.0
    at: int = 0
    value: float = 0.0
    expected: float = 0.0
    repeats: bool = True
    reason: str = ""

    @property
    def outside(self) -> bool:
        """Whether the result lies outside what its dtype and operator allow."""
        return self.comparable and not (self.error <= self.allowed and self.single <= SINGLE * self.allowed)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def compare_with_float64(call: OpCall) -> Discrepancy:
    """Recompute ``call`` from its inputs, on its device and on the CPU in float64, and compare.

    Parameters
    ----------
    call
        A call with its result. Its inputs must be what they were before the call: an operator that changes them needs
        copies. Results may be of any floating dtype and on any device.

    Returns
    -------
    Discrepancy
        Not comparable, with a reason, where the operator draws random numbers, its result is not the only right one, it may
        depend on more than its arguments, its inputs are large enough to overflow, or it cannot be run in float64. The
        limits are those of `oracle.limits`.

    """
    try:
        grad = torch.is_grad_enabled()
        with torch.no_grad():
            return _compared(call, grad=grad)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:  # a layout that has no such operator
        return _not_comparable(_said(error))


def _compared(call: OpCall, *, grad: bool) -> Discrepancy:
    func = call.func
    if draws(func, call.args, call.kwargs) or not is_unique(func):
        return _not_comparable("random, or not the only right result: not recomputed")
    # In the operator's own place, so that a device whose kernel fails there fails again.
    # By whether gradients are on some kernels are chosen.
    with own_work(call.module, call.phase, call.call), torch.set_grad_enabled(grad):
        again = _run_again(call)
    # work space, which comes last, may be left out where no gradient is asked for
    repeats = all(same_bits(a, b) for a, b in zip(again, defined_results(call), strict=False))
    try:
        with own_work(REFERENCE):
            exact = run_in_float64(func, call.args, call.kwargs)
            # Twice where something may not follow from the arguments: padding, or an operator with a state of its own.
            unsure = not repeats or not is_torchs(func)
            twice = run_in_float64(func, call.args, call.kwargs) if unsure else exact
    except Exception as error:  # a custom operator may refuse float64 in its own way
        return _not_comparable(_said(error), repeats=repeats)
    if not is_torchs(func) and not (repeats and all(map(torch.equal, exact, twice))):
        return _not_comparable(_STATEFUL, repeats=repeats)
    given = tensors_in([*call.args, *call.kwargs.values()])
    inputs = [local_values(t) for t in given if t.is_floating_point() and t.numel()]
    if may_overflow(call.outputs, inputs):
        return _not_comparable(OVERFLOWS, repeats=repeats)
    # The coarsest dtype of all, since a kernel may compute in any of them.
    allowed = limit_of((*inputs, *call.outputs))
    outputs, whole = defined_results(call), exact
    if not repeats and not is_wholly_defined(call):
        outputs = with_padding_filled(outputs, again, exact, allowed)
        exact = with_padding_filled(exact, twice, exact, allowed)
    found = replace(_distance(outputs, exact, []), allowed=allowed, repeats=repeats)
    if found.outside:  # or else its terms, which take some more runs, need not be known
        with own_work(REFERENCE):
            least = _least_sizes(call, inputs, outputs, whole, allowed)
        found = replace(_distance(outputs, exact, least), allowed=allowed, repeats=repeats)
    return found


def _not_comparable(reason: str, *, repeats: bool = True) -> Discrepancy:
    return Discrepancy(comparable=False, reason=reason, repeats=repeats)


def _said(error: Exception) -> str:
    return str(error).splitlines()[0][:_LONGEST_REASON]


def _run_again(call: OpCall) -> tuple[Tensor, ...]:
    """Return the results of a second run on the same device, which leaves the call's arguments as they are."""
    args, kwargs = call.args, call.kwargs
    if call.func._schema.is_mutable:
        args, kwargs = copied(args), copied(kwargs)
    return tensors_in(call.func(*args, **kwargs))


def _l2(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().cpu().double()))


def _least_sizes(
    call: OpCall, inputs: Sequence[Tensor], outputs: Sequence[Tensor], exact: Sequence[Tensor], allowed: float
) -> list[float]:
    """Return the L2 to which each result's error is relative, at the least; ``allowed`` is the relative error that is."""
    share = cancelled((*inputs, *outputs))
    least = [share * size for size in term_sizes(call.func, call.args, call.kwargs, exact)]
    if any(tensor.dtype is torch.float16 for tensor in (*inputs, *outputs)):
        # Its range is so narrow that terms may be lost on the way, which no result shows.
        lost = share * max(map(_l2, inputs), default=0.0)
        least = [max(size, lost) for size in least]
    floors = [underflow(x.dtype) * x.numel() ** 0.5 / (allowed or 1.0) if x.dtype in LIMIT else 0.0 for x in outputs]
    serial = [
        summed_in_place(call.op, inputs, x) / (allowed or 1.0) * _l2(golden)
        for x, golden in zip(outputs, exact, strict=False)
    ]
    return [max(found) for found in zip(least, floors, serial, strict=False)]


def _distance(outputs: Sequence[Tensor], exact: Sequence[Tensor], least: Sequence[float]) -> Discrepancy:
    """Return the distance of the output that is furthest off; ``least`` as `_least_sizes`, 0 where it is none."""
    worst = _not_comparable("no floating output")
    sizes = [*least, *[0.0] * len(outputs)]
    for actual, golden, size in zip(map(_dense, outputs), map(_dense, exact), sizes, strict=False):
        if not actual.is_floating_point() or not actual.numel() or actual.numel() != golden.numel():
            continue
        # Both figures on one scale, so that the output named is the one that convicts, if any does.
        found = _output_distance(actual, golden, size)
        if not worst.comparable or _badness(found) > _badness(worst):
            worst = found
    return worst


def _output_distance(actual: Tensor, golden: Tensor, least: float) -> Discrepancy:
    """Return the distance of one output, relative to its L2 or to ``least``."""
    value = actual.detach().cpu().double().reshape(-1)
    expected = golden.detach().double().reshape(-1)
    # What float64 does not find finite either, in the result's range, is no error: zero by zero, say.
    defined = value.isfinite() | golden.detach().to(actual.dtype).reshape(-1).isfinite()
    gap = gaps(value, expected, defined)
    finite = expected.masked_fill(~defined, 0.0)
    norm = max(float(finite.norm()), least)
    # An element that should be zero has no size of its own; its neighbours say what rounding may leave there.
    usual = norm / value.numel() ** 0.5
    at = int(gap.argmax())
    return Discrepancy(
        comparable=True,
        error=float(gap.norm()) / (norm or 1.0),
        single=float((gap / (finite.abs() + usual).clamp(min=torch.finfo(torch.float64).tiny)).max()),
        at=at,
        value=float(value[at]),
        expected=float(expected[at]),
    )


def _badness(found: Discrepancy) -> float:
    """Return one figure of both distances, by the limits that they are held against."""
    return max(SINGLE * found.error, found.single)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.detach().to_dense()
