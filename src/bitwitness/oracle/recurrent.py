"""An LSTM layer of oneDNN's, all of whose steps one operator computes, written out: for float64, and for its checksum.

``i, f, o = sigmoid``, ``g = tanh`` of ``x W_ih^T + h_before W_hh^T + b``; ``c = f c_before + i g``; ``h = o tanh(c)``
(Hochreiter and Schmidhuber, "Long short-term memory", 1997, with forget gates). Backward, the gates' gradients G are followed
from the last step to the first, ``dh = g_t + G_(t+1) W_hh``, and give everything else: ``dx = G W_ih``, ``dW_ih = G^T x``,
``dW_hh = G^T h_before``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Named = Mapping[str, Any]

_LSTM = 2
"""This kind of layer, as torch numbers them."""


@dataclass(slots=True)
class Layer:
    """A layer's numbers in the order in which it goes through time: inputs ``[T, B, I]``, hidden states ``[T, B, H]``.

    The first states are ``[B, H]``, the weights ``[4 H, I]`` and ``[4 H, H]``, the biases' sum ``[4 H]``.
    """

    x: Tensor
    h: Tensor
    before: Tensor
    """The hidden state before each step."""
    h0: Tensor
    c0: Tensor
    w_ih: Tensor
    w_hh: Tensor
    bias: Tensor | None
    reverse: bool

    def in_time(self, values: Tensor) -> Tensor:
        """Return values of steps as the layer goes through them, or back."""
        return values.flip(0) if self.reverse else values


@dataclass(slots=True)
class Gates:
    """What the gates let through, ``[T, B, H]`` each, and the cells, ``[T + 1, B, H]``, the first one's included."""

    i: Tensor
    f: Tensor
    g: Tensor
    o: Tensor
    cells: Tensor


@dataclass(slots=True)
class Gradients:
    """The gates' gradients G, ``[T, B, 4 H]``; the first cell's, ``[B, H]``; what came to cells and outputs, ``[T, B, H]``."""

    gates: Tensor
    cell: Tensor
    to_cells: Tensor
    to_outputs: Tensor


def is_lstm(named: Named) -> bool:
    """Tell whether a call is of an LSTM, of sequences of one length; one call is a layer, whatever ``num_layers`` says."""
    return named["mode"] == _LSTM and not named["batch_sizes"]


def forward_layer(named: Named, h: Tensor) -> Layer:
    """Return the layer of a call of ``mkldnn_rnn_layer`` that gave these hidden states."""
    return _layer(named, h, "cx_", ("weight0", "weight1", "weight2", "weight3"))


def backward_layer(named: Named) -> Layer:
    """Return the layer of a call of ``mkldnn_rnn_layer_backward``."""
    return _layer(named, named["output"], "cx_tmp", ("weight1", "weight2", "weight3", "weight4"))


def _layer(named: Named, h: Tensor, cell: str, weights: tuple[str, ...]) -> Layer:
    w_ih, w_hh, b_ih, b_hh = (named[name] for name in weights)
    x, shape = named["input"], h.shape[1:]
    if named["reverse"]:
        x, h = x.flip(0), h.flip(0)
    bias = b_ih + b_hh if named["has_biases"] else None
    h0 = named["hx_"].reshape(shape)
    before = torch.cat([h0[None], h[:-1]])
    return Layer(x, h, before, h0, named[cell].reshape(shape), w_ih, w_hh, bias, named["reverse"])


def opened(layer: Layer) -> Gates:
    """Return what the gates were, from all hidden states at once; only the cells are followed through time."""
    put_in = layer.x @ layer.w_ih.t() + layer.before @ layer.w_hh.t()
    if layer.bias is not None:
        put_in += layer.bias
    i, f, g, o = put_in.chunk(4, -1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    cells, cell = [layer.c0], layer.c0
    for new, kept in zip((i * g).unbind(), f.unbind(), strict=True):
        cell = torch.addcmul(new, kept, cell)
        cells.append(cell)
    return Gates(i, f, g, o, torch.stack(cells))


def followed(layer: Layer, gates: Gates, named: Named) -> Gradients:
    """Follow the gradients that a call of the backward was given, from the last step to the first."""
    given, last_h, last_c = (named[name] for name in ("grad_output", "grad_hy", "grad_cy"))
    given = None if given is None else layer.in_time(given)
    dh, dc = (layer.h0.new_zeros(layer.h0.shape) if t is None else t.reshape(layer.h0.shape) for t in (last_h, last_c))
    i, f, g, o = gates.i, gates.f, gates.g, gates.o
    cells, before = gates.cells[1:].tanh(), gates.cells[:-1]
    through = (o * (1 - cells.square())).unbind()
    slopes = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g.square())], 2).unbind()
    outward, kept = (cells * o * (1 - o)).unbind(), f.unbind()
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
    to_cells, to_outputs = torch.stack(came).unflatten(0, (len(f), 2)).flip(0).unbind(1)
    return Gradients(found.flatten(2), dc, to_cells, to_outputs)


def lstm_layer(named: Named) -> tuple[Tensor, ...]:
    """Return ``(output, last hidden state, last cell)`` for the arguments of ``mkldnn_rnn_layer``, in their dtype."""
    _ask_for_lstm(named)
    x, weights = named["input"], [named["weight0"], named["weight1"]]
    if named["has_biases"]:
        weights += [named["weight2"], named["weight3"]]
    state = [named[name].reshape(1, x.shape[1], -1) for name in ("hx_", "cx_")]
    x = x.flip(0) if named["reverse"] else x
    y, h, c = torch.lstm(x, state, weights, named["has_biases"], 1, 0.0, False, False, False)  # noqa: FBT003
    return y.flip(0) if named["reverse"] else y, h.reshape(named["hx_"].shape), c.reshape(named["cx_"].shape)


def lstm_layer_backward(named: Named) -> tuple[Tensor, ...]:
    """Return the gradients of the input, both weights, both biases and both first states, in their dtype."""
    _ask_for_lstm(named)
    layer = backward_layer(named)
    grads = followed(layer, opened(layer), named)
    rows, shape = grads.gates.flatten(0, 1), named["hx_"].shape
    weights = [rows.t() @ values.flatten(0, 1) for values in (layer.x, layer.before)]
    bias = rows.sum(0)
    first = grads.gates[0] @ layer.w_hh
    return (
        layer.in_time(grads.gates @ layer.w_ih),
        *weights,
        bias,
        bias,
        first.reshape(shape),
        grads.cell.reshape(shape),
    )


def _ask_for_lstm(named: Named) -> None:
    if not is_lstm(named):
        raise NotImplementedError("of recurrent layers only an LSTM of sequences of one length is written out")
