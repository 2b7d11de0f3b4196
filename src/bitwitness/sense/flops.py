"""How many floating-point operations an operator's call does, for the share of a step's work that was checked."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.utils.flop_counter import flop_registry

from bitwitness.oracle.kernels import named_arguments
from bitwitness.oracle.product import READERS
from bitwitness.sense import checksum_attention
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.operators import OpCall, tensors_in

_BACKWARD_ATTENTION = 2.5  # five matrix products instead of two
_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
_UNREAD_PRODUCTS = (
    "_addmm_activation",
    "addmm_",
    "addmv_",
    "addbmm_",
    "baddbmm_",
    "_int_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
)
_WEIGHT_DIMENSIONS = 2  # a recurrent layer's matrices; its biases do no work that counts


def carries_flops(func: OpOverload) -> bool:
    """Return whether an operator does work that counts: matrix products, attention, convolution, recurrent layers."""
    return _counter(func) is not None


def flops_of(call: OpCall) -> int:
    """Return the call's floating-point operations, a multiplication and an addition counted as two."""
    counter = _counter(call.func)
    return 0 if counter is None else counter(call)


def _counter(func: OpOverload) -> Callable[[OpCall], int] | None:
    name = func.overloadpacket.__name__
    if name in READERS or name in _UNREAD_PRODUCTS:
        return _product
    if name in checksum_attention.FORWARD or name in checksum_attention.BACKWARD:
        return _attention
    if name.removesuffix("_backward") in _RECURRENT:
        return _recurrent
    return _registered if func.overloadpacket in flop_registry else None


def _product(call: OpCall) -> int:
    bias = call.op.lstrip("_").startswith(("add", "badd"))
    left, right = tensors_in(call.args)[bias : 2 + bias]
    return 2 * left.numel() * (int(right.shape[-1]) if right.dim() > 1 else 1)


def _attention(call: OpCall) -> int:
    named = named_arguments(call.func, call.args, call.kwargs)
    query, key, value = named["query"], named["key"], named["value"]
    pairs = query.shape[:-1].numel() * int(key.shape[-2])
    forward: int = 2 * pairs * (int(query.shape[-1]) + int(value.shape[-1]))
    return round(forward * _BACKWARD_ATTENTION) if call.op in checksum_attention.BACKWARD else forward


def _recurrent(call: OpCall) -> int:
    """Count each weight matrix once a time step and sequence; backward twice that."""
    first = tensors_in(call.args)[0]
    positions = first.numel() // max(int(first.shape[-1]), 1)
    named = zip((argument.name for argument in call.func._schema.arguments), call.args, strict=False)
    tensors = [t for name, value in named if "weight" in name for t in tensors_in(value)]
    weights = sum(t.numel() for t in tensors if t.dim() == _WEIGHT_DIMENSIONS)  # not the biases
    return 2 * positions * weights * (2 if call.op.endswith("_backward") else 1)


def _registered(call: OpCall) -> int:
    counted = flop_registry[call.func.overloadpacket](*call.args, **call.kwargs, out_val=call.result)
    return int(counted) if math.isfinite(counted) else 0
