"""The checksum of an LSTM layer, whose operator on a CPU does all time steps at once and shows no gates, nor their gradients.

The hidden states of all steps are the layer's result, so the gates follow from one matrix product of all steps, and only cells
have to be followed: ``c_t = f c_(t-1) + i g``, ``h_t = o tanh(c_t)``, which has to be the result, element by element.

Backward, the gates' gradients G are followed from the last step to the first, ``dh_t = g_t + G_(t+1) W_hh``, and hold all
results (Hochreiter and Schmidhuber, "Long short-term memory", 1997, with forget gates): ``dx s = G (W_ih s)``,
``dW_ih s = G^T (x s)``, ``dW_hh s = G^T (h_before s)``, ``db = G^T 1``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.sense.invariant import Check, Invariant, Named, Signs, largest
from bitwitness.tap.operators import OpCall

_LSTM = 2
"""This kind of layer, as torch numbers them."""
_ULPS = 8 * 2.0**-24
"""What a product of a gate's may lose, relative to its factors' norms."""
_ACTIVATION = 1e-5
"""How far a kernel's sigmoid and tanh may be off: oneDNN's polynomials lose some 1e-6."""
_ROOM = 4.0
_OFF = 1e-3
"""Of its terms' size what a gradient may be off: of a few hundred steps, 1e-5 were seen."""
_PASSED_ON = 1e-4
"""Of the largest gradient that came to its gates what a sequence may be off at any step: steps hand on what they lost."""


@dataclass(slots=True)
class _Layer:
    """A layer's numbers in the order in which it goes through time: inputs ``[T, B, I]``, states ``[T, B, H]``."""

    x: Tensor
    h: Tensor
    h0: Tensor
    c0: Tensor
    w_ih: Tensor
    w_hh: Tensor
    bias: Tensor | None
    reverse: bool

    @property
    def before(self) -> Tensor:
        """The hidden state before each step."""
        return torch.cat([self.h0[None], self.h[:-1]])


@dataclass(slots=True)
class _Gates:
    """What the gates let through, ``[T, B, H]`` each; the cells, the first one's included; how far rounding may take them."""

    i: Tensor
    f: Tensor
    g: Tensor
    o: Tensor
    cells: Tensor
    lost: Tensor


def _layer(named: Named, h: Tensor, weights: tuple[str, ...], cell: str) -> _Layer | None:
    given = [named["input"], named["hx_"], named[cell], h, *(named[name] for name in weights)]
    is_plain = named["mode"] == _LSTM and not named["batch_sizes"] and named["num_layers"] == 1
    if not is_plain or any(t.dtype is not torch.float32 for t in given) or not h.numel():
        return None
    if str(getattr(getattr(torch.backends.mkldnn, "rnn", None), "fp32_precision", "")) in ("bf16", "tf32"):
        return None
    x, h0, c0, h, w_ih, w_hh, b_ih, b_hh = given
    shape = (h.shape[1], h.shape[2])
    if named["reverse"]:
        x, h = x.flip(0), h.flip(0)
    bias = b_ih + b_hh if named["has_biases"] else None
    return _Layer(x, h, h0.reshape(shape), c0.reshape(shape), w_ih, w_hh, bias, named["reverse"])


def _open(layer: _Layer) -> _Gates:
    """Follow the cells through time."""
    before = layer.before
    put_in = layer.x @ layer.w_ih.t() + before @ layer.w_hh.t()
    if layer.bias is not None:
        put_in += layer.bias
    i, f, g, o = put_in.chunk(4, -1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    cells, cell = [layer.c0], layer.c0
    for new, kept in zip((i * g).unbind(), f.unbind(), strict=True):
        cell = torch.addcmul(new, kept, cell)
        cells.append(cell)
    followed, lost = torch.stack(cells), _lost(layer, before)
    # a cell keeps no more of what it lost than all of it
    return _Gates(i, f, g, o, followed, (lost * (2 + followed[:-1].abs())).cumsum(0) + lost)


def _lost(layer: _Layer, before: Tensor) -> Tensor:
    """Return how far rounding may take each step's gates, ``[T, B, 1]``."""
    sizes = [_norms(layer.x) * _norms(layer.w_ih).amax(), _norms(before) * _norms(layer.w_hh).amax()]
    terms = layer.x.shape[-1] + before.shape[-1]
    size = sizes[0] + sizes[1] + (0.0 if layer.bias is None else layer.bias.abs().amax())
    return (_ULPS * (1 + math.sqrt(terms) / 4) * size + _ACTIVATION)[..., None]


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms


def _forward(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    h, last, cell = call.result[:3]
    layer = _layer(named, h, ("weight0", "weight1", "weight2", "weight3"), "cx_")
    if layer is None:
        return None
    gates = _open(layer)
    residual = gates.cells[1:].tanh().mul_(gates.o).sub_(layer.h)
    width, bound = int(h.shape[-1]), _ROOM * gates.lost
    return [
        _judged("h = o tanh(c)", residual, bound, per_row=width),
        _judged("c = f c + i g", cell.reshape(bound[-1].shape) - gates.cells[-1], bound[-1], per_row=width),
        _judged(
            "the last h", last.reshape(layer.h[-1].shape) - layer.h[-1], torch.full_like(bound[-1], 1e-6), per_row=width
        ),
    ]


def _backward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    layer = _layer(named, named["output"], ("weight1", "weight2", "weight3", "weight4"), "cx_tmp")
    if layer is None:
        return None
    shape = layer.h0.shape
    last_h, last_c = (None if named[n] is None else named[n].reshape(shape) for n in ("grad_hy", "grad_cy"))
    given = named["grad_output"]
    if given is not None and layer.reverse:
        given = given.flip(0)
    gates = _open(layer)
    grads = _followed(layer, gates, given, last_h, last_c)
    dx, dw_ih, dw_hh, *biases, dh0, dc0 = call.result
    found = [
        _by_step(dx.flip(0) if layer.reverse else dx, grads, layer.w_ih, signs, "dx s = G W_ih s"),
        _by_step(dh0.reshape(1, *shape), grads, layer.w_hh, signs, "dh0 s = G W_hh s"),
        _of_weight(dw_ih, grads, layer.x, signs, "dW_ih s = G^T x s"),
        _of_weight(dw_hh, grads, layer.before, signs, "dW_hh s = G^T h s"),
    ]
    if named["has_biases"]:
        ones = torch.ones(*grads.gates.shape[:2], 1)
        found += [_of_weight(bias[:, None], grads, ones, signs, "db = G^T 1") for bias in biases]
    expected = grads.cell
    bound = _OFF * expected.abs() + _PASSED_ON * grads.sizes.amax(0)[:, None]
    return [*found, _judged("dc0 = f dc", dc0.reshape(shape) - expected, bound, per_row=int(shape[-1]))]


@dataclass(slots=True)
class _Gradients:
    """The gates' gradients G, ``[T, B, 4 H]``; the first cell's, ``[B, H]``; the norms of what came to the gates, ``[T, B]``.

    A gate that is wide open or shut hands on next to nothing, of which no more is true than its rounded slope is.
    """

    gates: Tensor
    cell: Tensor
    sizes: Tensor
    by_gate: Tensor
    """The norms of each gate's gradients over all steps and sequences, ``[4 H]``."""


def _followed(
    layer: _Layer, gates: _Gates, given: Tensor | None, last_h: Tensor | None, last_c: Tensor | None
) -> _Gradients:
    """Follow the gradients from the last step to the first."""
    i, f, g, o = gates.i, gates.f, gates.g, gates.o
    cells, before = gates.cells[1:].tanh(), gates.cells[:-1]
    through = (o * (1 - cells.square())).unbind()
    slopes = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g.square())], 2).unbind()
    outward, kept = (cells * o * (1 - o)).unbind(), f.unbind()
    dh = torch.zeros_like(layer.h0) if last_h is None else last_h
    dc = torch.zeros_like(layer.c0) if last_c is None else last_c
    found = torch.empty(*f.shape[:2], 4, f.shape[-1], dtype=f.dtype, device=f.device)
    came: list[Tensor] = []
    for step in reversed(range(len(f))):
        if given is not None:
            dh = dh + given[step]
        dc = torch.addcmul(dc, dh, through[step])
        torch.mul(slopes[step], dc[:, None], out=found[step, :, :3])
        torch.mul(outward[step], dh, out=found[step, :, 3])
        came += [dc, dh]
        dh = found[step].flatten(1) @ layer.w_hh
        dc = dc * kept[step]
    norms = _norms(torch.stack(came).view(len(f), 2, *dc.shape)).flip(0)
    sizes = norms[:, 0] * before.abs().amax(-1).clamp_min(1) + norms[:, 1]
    flat = found.flatten(2)
    by_gate = torch.matmul(torch.ones(len(f) * len(dc)), flat.flatten(0, 1).square()).sqrt_()
    return _Gradients(flat, dc, sizes, by_gate)


def _by_step(dx: Tensor, grads: _Gradients, weight: Tensor, signs: Signs, name: str) -> Invariant:
    """Hold each step's and sequence's row, of the first steps if it has no more, against ``G W``."""
    s, scale = signs(int(dx.shape[-1]), dx.device, dx.dtype), Signs.scale(int(dx.shape[-1]))
    gates = grads.gates[: len(dx)]
    bound = (_OFF * _norms(gates) + _PASSED_ON * grads.sizes.amax(0)) * (scale * torch.linalg.vector_norm(weight))
    return _judged(name, dx @ s - gates @ (weight @ s), bound)


def _of_weight(dw: Tensor, grads: _Gradients, x: Tensor, signs: Signs, name: str) -> Invariant:
    """Hold each gate's row of a weight's gradient against ``G^T x``."""
    s, scale = signs(int(dw.shape[-1]), dw.device, dw.dtype), Signs.scale(int(dw.shape[-1]))
    rows = grads.gates.flatten(0, 1)
    off = _OFF * grads.by_gate + _PASSED_ON * torch.linalg.vector_norm(grads.sizes)
    bound = off * (scale * torch.linalg.vector_norm(x))
    return _judged(name, dw @ s - rows.t() @ (x.flatten(0, 1) @ s), bound)


def _judged(name: str, residual: Tensor, bound: Tensor, *, per_row: int = 1) -> Invariant:
    bound = bound.expand_as(residual) + torch.finfo(residual.dtype).tiny * 1e6
    judged = torch.isfinite(bound) & (bound < torch.finfo(residual.dtype).max / 4)
    return largest(name, residual.abs(), bound, judged, per_row=per_row)


CHECKS: dict[str, Check] = {"mkldnn_rnn_layer": _forward, "mkldnn_rnn_layer_backward": _backward}
"""Whose steps are followed, by operator."""
