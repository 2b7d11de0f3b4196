"""One operator alone, recomputed on its device and in float64: the proof where nobody else can be asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from bitwitness.sense.matmul import READERS
from bitwitness.stats import bit_hash
from bitwitness.stats.local import local_values
from bitwitness.tap.modules import REFERENCE, own_work
from bitwitness.tap.operators import OpCall, tensors_in

_CANCELLED = 0.01
LIMIT = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 2e-3}
"""Errors of a whole result, by L2, that no healthy operator shows: some ten times what rounding one result leaves,
sums included.

For float32 that is four times what TF32 leaves (2^-11), which a healthy device may be set to.
"""
_SINGLE = 8
"""Times the limit that one element may be off, beside its own size and the result's usual one: the largest of a
million roundings."""
_NOT_UNIQUE = ("svd", "eig", "linalg_qr", "geqrf", "ormqr", "householder", "lstsq", "lobpcg")
"""Parts of names of operators whose results are right with either sign or in any order."""
_TORCHS = frozenset(("aten", "prims", "quantized", "mkldnn", "c10d", "_c10d_functional", "torchvision"))
_STATEFUL = (
    "an operator that is not torch's, and gave other bits the second time: it may depend on more than its arguments"
)
_DEFINED = {"_ctc_loss": 1}
"""Operators of whose results only so many are defined everywhere; the others are work space."""


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """How far an operator's result is from float64's.

    ``error``: L2 distance of the whole result relative to float64's L2 (or to 1 % of the largest input's, if the result
    cancels to less: a sum that comes to nothing has no relative accuracy); ``single``: the same of the worst element,
    beside its
    size and the usual one; ``at``: flat index of the worst element of the first output; ``value`` and ``expected``:
    the device's
    and float64's number there. ``allowed``: the error that the coarsest dtype among inputs and results allows (a
    kernel may compute in it). ``comparable``: the operator could
    be run in float64. ``repeats``: running it once more on its device gave the same bits as ``value``'s result.
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
        return self.comparable and not (self.error <= self.allowed and self.single <= _SINGLE * self.allowed)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def compare_with_float64(call: OpCall) -> Discrepancy:
    """Recompute ``call`` from its inputs, on its device and on the CPU in float64, and compare.

    The inputs must be what they were before the call. An operator that draws random numbers, or whose result is not the
    only right one, is reported as not comparable.
    """
    try:
        return _compared(call)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:  # a layout that has no such operator
        return Discrepancy(comparable=False, reason=str(error).splitlines()[0][:200])


def _compared(call: OpCall) -> Discrepancy:
    name = call.func.overloadpacket.__name__
    if _draws(call) or any(part in name for part in _NOT_UNIQUE):
        return Discrepancy(comparable=False, reason="random, or not the only right result: not recomputed")
    with torch.no_grad():
        with own_work(call.module, call.phase, call.call):
            again = tensors_in(call.func(*_copied(call, call.args), **_copied(call, call.kwargs)))
        repeats = all(bool(torch.equal(bit_hash(a), bit_hash(b))) for a, b in zip(again, call.outputs, strict=True))
        try:
            with own_work(REFERENCE):
                exact = tensors_in(call.func(*_doubled(call.args), **_doubled(call.kwargs)))
                unsure = not repeats or not _is_torchs(call)
                twice = tensors_in(call.func(*_doubled(call.args), **_doubled(call.kwargs))) if unsure else exact
        except Exception as error:  # a custom operator may refuse float64 in its own way
            return Discrepancy(comparable=False, repeats=repeats, reason=str(error).splitlines()[0][:200])
        if not _is_torchs(call) and not (repeats and all(map(torch.equal, exact, twice))):
            return Discrepancy(comparable=False, repeats=repeats, reason=_STATEFUL)
        given = tensors_in([*call.args, *call.kwargs.values()])
        inputs = [local_values(t) for t in given if t.is_floating_point() and t.numel()]
        if _overflows(call.outputs, inputs):
            return Discrepancy(comparable=False, repeats=repeats, reason="its inputs are large enough to overflow")
        largest = max(inputs, key=lambda t: float(torch.linalg.vector_norm(t.detach().cpu().double())), default=None)
        allowed = max((LIMIT[t.dtype] for t in (*inputs, *call.outputs) if t.dtype in LIMIT), default=0.0)
        outputs = call.outputs[: _DEFINED.get(name, len(call.outputs))]
        if not repeats and not _wholly_defined(call):
            outputs, exact = _defined(outputs, again, exact, allowed), _defined(exact, twice, exact, allowed)
        return _distance(outputs, exact, largest, allowed, repeats=repeats)


def _is_torchs(call: OpCall) -> bool:
    """Tell whether an operator is torch's own; one that a script declares may depend on more than its arguments."""
    return call.func.namespace in _TORCHS


def _draws(call: OpCall) -> bool:
    """Tell whether a call draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in call.func.tags:
        return False
    names = [argument.name for argument in call.func._schema.arguments]
    defaults = {a.name: a.default_value for a in call.func._schema.arguments if a.has_default_value()}
    given = {**defaults, **dict(zip(names, call.args, strict=False)), **call.kwargs}
    return bool(given.get("dropout_p", 1.0) != 0.0)


def _wholly_defined(call: OpCall) -> bool:
    """Tell whether an operator writes every element of its results, so that one that varies is no padding."""
    return call.op in READERS or call.op.startswith("convolution") or torch.Tag.pointwise in call.func.tags


def _defined(
    values: tuple[torch.Tensor, ...], again: tuple[torch.Tensor, ...], fill: tuple[torch.Tensor, ...], allowed: float
) -> tuple[torch.Tensor, ...]:
    """Return results with float64's in the place of elements that vary when they are computed again.

    Padding that nobody writes holds what the memory held before: it is no result. What comes out as float64's the other
    time is one, and was wrong this time.
    """
    found = []
    for value, other, there in zip(values, again, fill, strict=False):
        if not value.is_floating_point() or not value.shape == other.shape == there.shape:
            found.append(value)
            continue
        right = there.to(value.device, value.dtype)
        same = (value == other) | (value.isnan() & other.isnan()) | _near(value, other, allowed)
        found.append(torch.where(same | (_near(other, right, allowed) & (right != 0)), value, right))
    return tuple(found)


def _near(a: torch.Tensor, b: torch.Tensor, allowed: float) -> torch.Tensor:
    """Tell which elements differ by no more than a kernel does that rounds otherwise."""
    return (a - b).abs() <= allowed * torch.maximum(a.abs(), b.abs())


def _copied(call: OpCall, value: Any) -> Any:
    """Return arguments of their own for an operator that changes some of them."""
    if not call.func._schema.is_mutable:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(_copied(call, item) for item in value)
    return {key: _copied(call, item) for key, item in value.items()} if isinstance(value, dict) else value


def _overflows(outputs: tuple[torch.Tensor, ...], inputs: list[torch.Tensor]) -> bool:
    """Tell whether a result that is not finite may be lawful: squares of such inputs leave the result's range.

    Upwards they become infinite, downwards zero, by which something may be divided.
    """
    for output in outputs:
        if output.is_floating_point() and output.numel() and not bool(torch.isfinite(local_values(output)).all()):
            sizes = torch.cat(
                [t.detach().cpu().double().abs().reshape(-1) for t in inputs] or [torch.zeros(1).double()]
            )
            limits = torch.finfo(output.dtype)
            smallest = sizes[sizes > 0].amin() if bool((sizes > 0).any()) else torch.ones(())
            return not float(sizes.amax()) < 1e-3 * limits.max**0.5 or float(smallest) < 1e3 * limits.tiny**0.5
    return False


def _distance(
    outputs: tuple[torch.Tensor, ...],
    exact: tuple[torch.Tensor, ...],
    largest: torch.Tensor | None,
    allowed: float,
    *,
    repeats: bool,
) -> Discrepancy:
    worst = Discrepancy(comparable=False, repeats=repeats, reason="no floating output")
    size = 0.0 if largest is None else float(torch.linalg.vector_norm(largest.detach().cpu().double()))
    usual_input = 0.0 if largest is None else size / largest.numel() ** 0.5
    for actual, golden in zip(map(_dense, outputs), map(_dense, exact), strict=False):
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
        finite = expected.masked_fill(lawful, 0.0)
        norm = float(finite.norm())
        error = float(gap.norm()) / (max(norm, _CANCELLED * size) or 1.0)
        usual = max(norm / value.numel() ** 0.5, _CANCELLED * usual_input)
        at = int(gap.argmax())
        single = float((gap / (finite.abs() + usual).clamp(min=1e-300)).max())
        if not worst.comparable or max(_SINGLE * error, single) > max(_SINGLE * worst.error, worst.single):
            worst = Discrepancy(
                comparable=True,
                error=error,
                single=single,
                allowed=allowed,
                at=at,
                value=float(value[at]),
                expected=float(expected[at]),
                repeats=repeats,
            )
    return worst


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.detach().to_dense()


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
