"""In-place operators, shown as what they compute: ``relu_`` leaves in a tensor what ``relu`` gives of a copy made before.

Who holds a result against its inputs needs these, and an in-place operator leaves none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from bitwitness.stats.local import is_plain
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import Handler, OpCall, OperatorTap, Selector, tensors_in

_KNOWN = frozenset(
    (
        *("add", "sub", "mul", "div", "pow", "addcmul", "addcdiv", "lerp", "addmm", "addmv", "addbmm", "baddbmm"),
        *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "hardtanh", "hardswish"),
        *("hardsigmoid", "threshold", "tanh", "sigmoid", "clamp", "clamp_min", "clamp_max"),
        *("exp", "log", "log1p", "expm1"),
        *("sqrt", "rsqrt", "reciprocal", "square", "neg", "abs", "erf", "sin", "cos", "nan_to_num", "tril", "triu"),
        *("zero", "fill", "masked_fill", "masked_scatter", "index_put", "index_add", "index_copy", "index_fill"),
        *("scatter", "scatter_add", "scatter_reduce"),
    )
)
"""Those that give numbers of their first argument's kind, and draw none."""


@cache
def functional_of(func: OpOverload) -> OpOverload | None:
    """Return the operator that gives as a result what one of torch's writes over its first argument; None for all others."""
    name = func.overloadpacket.__name__.removesuffix("_")
    if func.namespace != "aten" or name == func.overloadpacket.__name__ or name not in _KNOWN:
        return None
    packet = getattr(torch.ops.aten, name)
    every = [getattr(packet, overload) for overload in packet.overloads()]
    return next((one for one in every if _takes(one) == _takes(func) and not one._schema.is_mutable), None)


def _takes(func: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments]


class InPlaceCalls:
    """Copies what an in-place operator is about to write over. Both methods are for one call, in this order."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def before(self, call: OpCall) -> None:
        """Keep a call's first argument, where the call can be shown as another afterwards."""
        self._kept = None
        if functional_of(call.func) is not None and _can_be_shown(call):
            self._kept = call.args[0].detach().clone()

    def shown(self, call: OpCall) -> OpCall:
        """Return the functional call that gives what this one left in its first argument; other calls as they are."""
        kept, self._kept = self._kept, None
        func = None if kept is None else functional_of(call.func)
        if kept is None or func is None or kept.stride() != call.args[0].stride():
            return call
        args = (kept, *(kept if value is call.args[0] else value for value in call.args[1:]))
        return replace(call, func=func, args=args, op=func.overloadpacket.__name__, at=call.op)


def functional_tap(tracker: ModuleTracker, handler: Handler, select: Selector) -> OperatorTap:
    """Return a tap whose handler is shown in-place operators as functional ones, where it wants these."""
    in_place = InPlaceCalls()
    return OperatorTap(
        tracker,
        lambda call: handler(in_place.shown(call)),
        lambda func: select(functional_of(func) or func),
        in_place.before,
    )


def _can_be_shown(call: OpCall) -> bool:
    """Tell whether nothing else that a call reads lies where it writes, and its result keeps the dtype of what is there."""
    written = call.args[0] if call.args else None
    if not isinstance(written, Tensor) or not is_plain(written) or not written.is_floating_point():
        return False
    others = [t for t in tensors_in((*call.args[1:], *call.kwargs.values())) if t is not written]
    if not all(map(is_plain, others)):
        return False
    at = written.untyped_storage().data_ptr()
    return all(
        t.untyped_storage().data_ptr() != at and torch.promote_types(t.dtype, written.dtype) is written.dtype
        for t in others
        if t.numel()
    )
