"""Operators that have no kernel for float64, written in those that have one: scaled and grouped products, oneDNN's LSTM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bitwitness.oracle.kernels import named_arguments
from bitwitness.oracle.scaled import KeptAs, is_scaled_product, scaled_product
from bitwitness.tap.compat import OpOverload


def written_out(func: OpOverload, kept_as: KeptAs) -> Callable[..., Any] | None:
    """Return what computes in float64 an operator that has no kernel for it; None for one that has, or is not known.

    ``kept_as``: in which dtype the device keeps a tensor.
    """
    if is_scaled_product(func):
        return lambda *args, **kwargs: scaled_product(func, args, kwargs, kept_as)
    if func.namespace == "aten" and func.overloadpacket.__name__ == "_grouped_mm":
        return lambda *args, **kwargs: grouped_product(func, args, kwargs)
    if func.namespace == "aten" and func.overloadpacket.__name__ == "mkldnn_rnn_layer":
        return lambda *args, **kwargs: lstm_layer(named_arguments(func, args, kwargs))
    return None


_LSTM = 2
"""What ``mode`` says of an LSTM; oneDNN is asked for no other kind."""


def lstm_layer(named: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what one direction of one layer of an LSTM gives: all states, the last one, the last cell, and no work space.

    Raises NotImplementedError for another kind of network, and for sequences of several lengths.
    """
    if named["mode"] != _LSTM or named["batch_sizes"]:
        raise NotImplementedError("only LSTMs are written out, of sequences of one length")
    steps, cell = named["input"].double(), named["cx_"].double()
    state, last = named["hx_"].double(), cell.shape
    state, cell = (t.reshape(-1, t.shape[-1]) for t in (state, cell))
    weights = [named[f"weight{i}"].double() for i in range(4)]
    found = []
    for one in steps.flip(0) if named["reverse"] else steps:
        gates = one @ weights[0].t() + state @ weights[1].t()
        gates = gates + weights[2] + weights[3] if named["has_biases"] else gates
        let_in, forget, new, out = gates.chunk(4, -1)
        cell = forget.sigmoid() * cell + let_in.sigmoid() * new.tanh()
        state = out.sigmoid() * cell.tanh()
        found.append(state)
    if named["reverse"]:
        found.reverse()
    return torch.stack(found), state.reshape(last), cell.reshape(last), cell.new_zeros(0)


def grouped_product(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what ``_grouped_mm`` should be: a product for each group, of rows, of columns, or along what is summed."""
    named = named_arguments(func, args, kwargs)
    a, b = named["self"].double(), named["mat2"].double()
    if named.get("offs") is None:
        found = torch.bmm(a, b)
    else:
        ends = [0, *named["offs"].tolist()]
        groups = [slice(begin, end) for begin, end in pairwise(ends)]
        if a.dim() == 2 and b.dim() == 2:
            found = torch.stack([a[:, g] @ b[g] for g in groups])
        elif a.dim() == 2:
            found = _filled(torch.cat([a[g] @ b[i] for i, g in enumerate(groups)]), len(a), 0)
        else:
            found = _filled(torch.cat([a[i] @ b[:, g] for i, g in enumerate(groups)], dim=1), b.shape[1], 1)
    return found if (bias := named.get("bias")) is None else found + bias.double()


def _filled(found: Tensor, size: int, dim: int) -> Tensor:
    """Return a result with what belongs to no group, where there is more memory than groups need, as zeros."""
    missing = size - found.shape[dim]
    shape = [missing if d == dim else n for d, n in enumerate(found.shape)]
    return torch.cat([found, found.new_zeros(shape)], dim=dim) if missing > 0 else found
