"""What has no identity is computed in a wider type: activation functions and powers, forward and backward.

One element follows from one element of each input, so another kernel gives the same within a few units of the last place, of
the result or of what cancels in it. A device that computes wrongly in the same way each time does not do so in another type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwitness.numerics import unit_roundoff
from bitwitness.sense.invariant import Check, Invariant, Named, Signs, largest
from bitwitness.tap.operators import OpCall

_WIDER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
_DEVICES = ("cpu", "cuda")
"""Those that compute in float64."""
_UNITS = 8.0
_LEAST = 2.0**-16
"""Share of its size that a result may be off at least: exponentials lose the size of their exponents, tables some bits."""
_ABSOLUTE = {"erf": 2.0**-20, "tanh": 2.0**-20, "sin": 2.0**-20, "cos": 2.0**-20}
"""Of a number near zero these may lose so much: torch's erf of bfloat16 loses 1e-7 on a CPU."""
_SENSITIVE = ("pow", "softplus", "softplus_backward", "threshold_backward")
"""To a number of the script's that is rounded otherwise in another type: an exponent, or where something changes."""
_LARGE, _ONE_IN = 1 << 18, 128
"""Of a result of more elements one row in so many is computed again, by turns: it takes several times as long."""


def _wider(call: OpCall, _named: Named, signs: Signs) -> list[Invariant] | None:
    out = call.outputs[0]
    given = [value for value in call.args if isinstance(value, Tensor)]
    wide = _WIDER.get(out.dtype)
    if wide is None or out.device.type not in _DEVICES or any(value.dtype is not out.dtype for value in given):
        return None
    if any(value.shape != out.shape or value.device != out.device for value in given):
        return None
    if call.op in _SENSITIVE and any(not _holds(out.dtype, value) for value in call.args):
        return None
    columns = int(out.shape[-1]) if out.dim() else 1
    rows = [value.reshape(-1, columns) for value in (out, *given)]
    turn = signs.turn(_ONE_IN) if out.numel() > _LARGE else slice(None)
    if turn.start is not None and turn.start >= len(rows[0]):
        return None  # a few long rows: in another step
    residual, threshold = (torch.zeros(len(rows[0]), dtype=wide, device=out.device) for _ in range(2))
    residual[turn], threshold[turn] = _worst(call, *(value[turn] for value in rows))
    name = f"{call.op} in {str(wide).removeprefix('torch.')}"
    return [largest(name, residual, threshold, torch.isfinite(threshold) & (threshold > 0))]


def _holds(dtype: torch.dtype, value: object) -> bool:
    """Tell whether a value is no number, or one that a type holds without rounding it."""
    return not isinstance(value, int | float) or torch.tensor(value, dtype=dtype).item() == value


def _worst(call: OpCall, out: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far the worst element of each row is off, and how far it may be."""
    wide = _WIDER[out.dtype]
    inputs = [value.to(wide) for value in given]
    tensors = iter(inputs)
    args = [next(tensors) if isinstance(value, Tensor) else value for value in call.args]
    expected = call.func(*args, **call.kwargs)
    size = inputs[0].abs()
    for other in inputs[1:]:
        size *= 1 + other.abs()
    info = torch.finfo(out.dtype)
    size += expected.abs()
    size.masked_fill_(~(size < info.max / 4), torch.inf)
    size *= max(_UNITS * unit_roundoff(out.dtype), _LEAST)
    size += _ABSOLUTE.get(call.op, 4 * info.smallest_normal)
    residual = (out - expected).abs_()
    at = torch.where(torch.isfinite(size), residual / size, 0.0).argmax(-1, keepdim=True)
    return residual.gather(-1, at)[:, 0], size.gather(-1, at)[:, 0]


CHECKS: dict[str, Check] = dict.fromkeys(
    (
        *("gelu", "gelu_backward", "silu", "silu_backward", "mish", "mish_backward", "relu", "threshold_backward"),
        *("leaky_relu", "leaky_relu_backward", "elu", "softplus", "softplus_backward", "hardswish", "hardsigmoid"),
        *("hardswish_backward", "hardsigmoid_backward"),
        *("tanh", "tanh_backward", "sigmoid", "sigmoid_backward"),
        *("exp", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "pow", "erf", "sin", "cos", "neg", "abs"),
    ),
    _wider,
)
"""Who is computed again, by operator."""
