"""One operator alone, recomputed on its device and in float64: the proof where nobody else can be asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from bitwitness.stats import bit_hash
from bitwitness.tap.modules import own_work
from bitwitness.tap.operators import OpCall, tensors_in

_CANCELLED = 0.01
LIMIT = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 2e-3}
"""Errors beyond these no healthy operator shows: some ten times what rounding one result leaves, sums included."""


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """How far an operator's result is from float64's.

    ``error``: L2 distance of the whole result relative to float64's L2 (or to 1 % of the largest input's, if the result
    cancels to less: a sum that comes to nothing has no relative accuracy); ``at``: flat index of the worst element of the
    first output; ``value`` and ``expected``: the device's and float64's number there. ``comparable``: the operator could
    be run in float64. ``repeats``: running it once more on its device gave the same bits as ``value``'s result.
    """

    comparable: bool
    error: float = 0.0
    at: int = 0
    value: float = 0.0
    expected: float = 0.0
    repeats: bool = True
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def compare_with_float64(call: OpCall) -> Discrepancy:
    """Recompute ``call`` from its inputs, on its device and on the CPU in float64, and compare.

    The call must be functional and deterministic: an in-place operator, or one that draws random numbers, is reported as
    not comparable.
    """
    if call.func._schema.is_mutable or torch.Tag.nondeterministic_seeded in call.func.tags:
        return Discrepancy(comparable=False, reason="in place or random: not recomputed")
    with torch.no_grad():
        with own_work(call.module, call.phase, call.call):
            again = tensors_in(call.func(*call.args, **call.kwargs))
        repeats = all(bool(torch.equal(bit_hash(a), bit_hash(b))) for a, b in zip(again, call.outputs, strict=True))
        try:
            with own_work():
                exact = tensors_in(call.func(*_doubled(call.args), **_doubled(call.kwargs)))
        except Exception as error:  # a custom operator may refuse float64 in its own way
            return Discrepancy(comparable=False, repeats=repeats, reason=str(error).splitlines()[0][:200])
        inputs = [t for t in tensors_in([*call.args, *call.kwargs.values()]) if t.is_floating_point() and t.numel()]
        if _overflows(call.outputs, inputs):
            return Discrepancy(comparable=False, repeats=repeats, reason="its inputs are large enough to overflow")
        size = max((float(torch.linalg.vector_norm(t.detach().cpu().double())) for t in inputs), default=0.0)
        return _distance(call.outputs, exact, floor=_CANCELLED * size, repeats=repeats)


def _overflows(outputs: tuple[torch.Tensor, ...], inputs: list[torch.Tensor]) -> bool:
    """Tell whether a result that is not finite may be lawful: squares of such inputs leave the result's range.

    Upwards they become infinite, downwards zero, by which something may be divided.
    """
    for output in outputs:
        if output.is_floating_point() and output.numel() and not bool(torch.isfinite(output).all()):
            sizes = torch.cat(
                [t.detach().cpu().double().abs().reshape(-1) for t in inputs] or [torch.zeros(1).double()]
            )
            limits = torch.finfo(output.dtype)
            smallest = sizes[sizes > 0].amin() if bool((sizes > 0).any()) else torch.ones(())
            return not float(sizes.amax()) < 1e-3 * limits.max**0.5 or float(smallest) < 1e3 * limits.tiny**0.5
    return False


def _distance(
    outputs: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...], *, floor: float, repeats: bool
) -> Discrepancy:
    worst = Discrepancy(comparable=False, repeats=repeats, reason="no floating output")
    for actual, golden in zip(outputs, exact, strict=False):
        if not actual.is_floating_point() or not actual.numel():
            continue
        value = actual.detach().cpu().double().reshape(-1)
        expected = golden.detach().double().reshape(-1)
        if value.shape != expected.shape:
            continue
        gap = (value - expected).abs()
        # What float64 does not find finite either, in the result's range, is no error: zero by zero, say.
        lawful = ~value.isfinite() & ~golden.detach().to(actual.dtype).reshape(-1).isfinite()
        gap = gap.masked_fill(lawful | (value == expected), 0.0).nan_to_num(nan=float("inf"))
        scale = max(float(expected.masked_fill(lawful, 0.0).norm()), floor) or 1.0
        error = float(gap.norm()) / scale
        at = int(gap.argmax())
        if not worst.comparable or error > worst.error:
            worst = Discrepancy(
                comparable=True,
                error=error,
                at=at,
                value=float(value[at]),
                expected=float(expected[at]),
                repeats=repeats,
            )
    return worst


def _doubled(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().double() if value.is_floating_point() else value.detach().cpu()
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list | tuple):
        return type(value)(_doubled(item) for item in value)
    if isinstance(value, dict):
        return {key: _doubled(item) for key, item in value.items()}
    return value
