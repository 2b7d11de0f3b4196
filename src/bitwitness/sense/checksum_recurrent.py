"""The checksum of an LSTM layer, whose operator on a CPU does all time steps at once and shows no gates, nor their gradients.

The hidden states of all steps are the layer's result, so the gates follow from one matrix product of all steps, and only cells
have to be followed: ``c_t = f c_(t-1) + i g``, ``h_t = o tanh(c_t)``, which has to be the result, element by element.

Backward, the gates' gradients G are followed from the last step to the first, ``dh_t = g_t + G_(t+1) W_hh``, and hold all
results (Hochreiter and Schmidhuber, "Long short-term memory", 1997, with forget gates): ``dx s = G (W_ih s)``,
``dW_ih s = G^T (x s)``, ``dW_hh s = G^T (h_before s)``, ``db = G^T 1``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitwitness.oracle.recurrent import (
    Gates,
    Gradients,
    Layer,
    backward_layer,
    followed,
    forward_layer,
    is_lstm,
    opened,
)
from bitwitness.sense.invariant import Check, Invariant, Named, Signs, in_range, largest
from bitwitness.tap.operators import OpCall

_ULPS = 8 * 2.0**-24
"""What a product of a gate's may lose, relative to its factors' norms."""
_ACTIVATION = 1e-5
"""How far a kernel's sigmoid and tanh may be off: oneDNN's polynomials lose some 1e-6."""
_ROOM = 4.0
_OFF = 1e-3
"""Of its terms' size what a gradient may be off: of a few hundred steps, 1e-5 were seen."""
_PASSED_ON = 1e-4
"""Of the largest gradient that came to its gates what a sequence may be off at any step: steps hand on what they lost."""


def _is_checked(named: Named, h: Tensor) -> bool:
    given = [value for value in named.values() if isinstance(value, Tensor) and value.is_floating_point()]
    if not is_lstm(named) or not h.numel() or any(t.dtype is not torch.float32 for t in given):
        return False
    return str(getattr(getattr(torch.backends.mkldnn, "rnn", None), "fp32_precision", "")) not in ("bf16", "tf32")


def _lost(layer: Layer) -> Tensor:
    """Return how far rounding may take each step's gates, ``[T, B, 1]``."""
    before = layer.before
    sizes = [_norms(layer.x) * _norms(layer.w_ih).amax(), _norms(before) * _norms(layer.w_hh).amax()]
    terms = layer.x.shape[-1] + before.shape[-1]
    size = sizes[0] + sizes[1] + (0.0 if layer.bias is None else layer.bias.abs().amax())
    return (_ULPS * (1 + math.sqrt(terms) / 4) * size + _ACTIVATION)[..., None]


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms


def _forward(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    h, last, cell = call.result[:3]
    if not _is_checked(named, h):
        return None
    layer = forward_layer(named, h)
    gates, lost = opened(layer), _lost(layer)
    # a cell keeps no more of what it lost than all of it
    bound = _ROOM * ((lost * (2 + gates.cells[:-1].abs())).cumsum(0) + lost)
    residual = gates.cells[1:].tanh().mul_(gates.o).sub_(layer.h)
    width, last = int(h.shape[-1]), last.reshape(layer.h[-1].shape) - layer.h[-1]
    return [
        _judged("h = o tanh(c)", residual, bound, per_row=width),
        _judged("c = f c + i g", cell.reshape(bound[-1].shape) - gates.cells[-1], bound[-1], per_row=width),
        _judged("the last h", last, torch.full_like(last, 1e-6), per_row=width),
    ]


def _backward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    if not _is_checked(named, named["output"]):
        return None
    layer = backward_layer(named)
    gates = opened(layer)
    grads = followed(layer, gates, named)
    sizes = _sizes(gates, grads)
    by_gate = (
        torch.ones(grads.gates.shape[:2].numel()) @ grads.gates.flatten(0, 1).square()
    )  # a norm across memory is slow
    off = _OFF * by_gate.sqrt_() + _PASSED_ON * torch.linalg.vector_norm(sizes)
    dx, dw_ih, dw_hh, *biases, dh0, dc0 = call.result
    found = [
        _by_step(layer.in_time(dx), grads, sizes, layer.w_ih, signs, "dx s = G W_ih s"),
        _by_step(dh0.reshape(1, *layer.h0.shape), grads, sizes, layer.w_hh, signs, "dh0 s = G W_hh s"),
        _of_weight(dw_ih, grads, off, layer.x, signs, "dW_ih s = G^T x s"),
        _of_weight(dw_hh, grads, off, layer.before, signs, "dW_hh s = G^T h s"),
    ]
    if named["has_biases"]:
        ones = torch.ones(*grads.gates.shape[:2], 1)
        found += [_of_weight(bias[:, None], grads, off, ones, signs, "db = G^T 1") for bias in biases]
    bound = _OFF * grads.cell.abs() + _PASSED_ON * sizes.amax(0)[:, None]
    residual = dc0.reshape(grads.cell.shape) - grads.cell
    return [*found, _judged("dc0 = f dc", residual, bound, per_row=int(residual.shape[-1]))]


def _sizes(gates: Gates, grads: Gradients) -> Tensor:
    """Return the size of what came to the gates, ``[T, B]``.

    A gate that is wide open or shut hands on next to nothing, of which no more is true than its rounded slope is.
    """
    return _norms(grads.to_cells) * gates.cells[:-1].abs().amax(-1).clamp_min(1) + _norms(grads.to_outputs)


def _by_step(dx: Tensor, grads: Gradients, sizes: Tensor, weight: Tensor, signs: Signs, name: str) -> Invariant:
    """Hold each step's and sequence's row, of the first steps if it has no more, against ``G W``."""
    s, scale = signs(int(dx.shape[-1]), dx.device, dx.dtype), Signs.scale(int(dx.shape[-1]))
    gates = grads.gates[: len(dx)]
    bound = (_OFF * _norms(gates) + _PASSED_ON * sizes.amax(0)) * (scale * torch.linalg.vector_norm(weight))
    return _judged(name, dx @ s - gates @ (weight @ s), bound)


def _of_weight(dw: Tensor, grads: Gradients, off: Tensor, x: Tensor, signs: Signs, name: str) -> Invariant:
    """Hold each gate's row of a weight's gradient against ``G^T x``; ``off``: how far each gate's gradients may be off."""
    s, scale = signs(int(dw.shape[-1]), dw.device, dw.dtype), Signs.scale(int(dw.shape[-1]))
    bound = off * (scale * torch.linalg.vector_norm(x))
    return _judged(name, dw @ s - grads.gates.flatten(0, 1).t() @ (x.flatten(0, 1) @ s), bound)


def _judged(name: str, residual: Tensor, bound: Tensor, *, per_row: int = 1) -> Invariant:
    bound = bound.expand_as(residual) + torch.finfo(residual.dtype).tiny * 1e6
    judged = in_range(bound, residual.dtype)
    return largest(name, residual.abs(), bound, judged, per_row=per_row)


CHECKS: dict[str, Check] = {"mkldnn_rnn_layer": _forward, "mkldnn_rnn_layer_backward": _backward}
"""Whose steps are followed, by operator."""
