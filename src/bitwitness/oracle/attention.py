"""Fused attention by its formula, for which every device has a kernel, or several, of another name.

All of them compute ``O = P V`` with ``P = softmax(S)`` and ``S = scale Q K^T + bias``, where row i of a causal one sees the
first i + 1 keys; of a row that sees none the result is zero. Where K and V have fewer heads than Q, each serves several in a
row. The backward is that of Dao et al., "FlashAttention" (2022): ``dV = P^T dO``, ``dS = P o (dO V^T - <dO, O>)``,
``dQ = scale dS K``, ``dK = scale dS^T Q``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_PART = 1 << 24  # scores at a time: 128 MiB in float64


def attention(named: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return ``(O,)`` for an attention kernel's arguments by name, in their dtype: ``[batch, heads, length, channels]``."""
    of = _Attention(named)
    out = of.q.new_zeros(*of.q.shape[:-1], of.v.shape[-1])
    for at in of.parts():
        out[at] = of.probabilities(*at) @ of.v[at[0]]
    return (out,)


def attention_with_logsumexp(named: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return ``(O, logsumexp)``: the logarithm of the sum of ``exp(S)`` is ``[batch, heads, length]``."""
    of = _Attention(named)
    found = of.q.new_zeros(of.q.shape[:-1])
    for at in of.parts():
        found[at] = of.scores(*at).logsumexp(-1)
    return (*attention(named), found)


def attention_backward(named: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the gradients of Q, K, V and, where one was asked for, of the bias; ``out`` is the O that the kernel was given."""
    return _backward(_Attention(named), named)


def _backward(of: _Attention, named: Mapping[str, Any]) -> tuple[Tensor, ...]:
    grad, out = named["grad_out"] if "grad_out" in named else named["grad_out_"], named["out"]
    dq, dk, dv = map(torch.zeros_like, (of.q, of.k, of.v))
    bias, mask = named.get("attn_bias"), named.get("grad_input_mask")
    wanted = mask is not None and bool(mask[-1])
    dbias = of.q.new_zeros(*of.q.shape[:-1], of.k.shape[-2]) if wanted and isinstance(bias, Tensor) else None
    for at in of.parts():
        p = of.probabilities(*at)
        ds = p * (grad[at] @ of.v[at[0]].transpose(-2, -1) - (grad[at] * out[at]).sum(-1, keepdim=True))
        dq[at] = ds @ of.k[at[0]] * of.scale
        dk[at[0]] += ds.transpose(-2, -1) @ of.q[at] * of.scale
        dv[at[0]] += p.transpose(-2, -1) @ grad[at]
        if dbias is not None:
            dbias[at] = ds
    found = (dq, of.over_heads(dk), of.over_heads(dv))
    return found if dbias is None or bias is None else (*found, dbias.sum_to_size(bias.shape))


def attention_backward_from_logsumexp(named: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the same as kernels compute it: with ``P = exp(S - logsumexp)``, of the forward's ``logsumexp``."""
    return _backward(_Attention(named, logsumexp=named["logsumexp"]), named)


class _Attention:
    """What forward and backward share; keys and values are repeated for the heads that share them."""

    def __init__(self, named: Mapping[str, Any], *, logsumexp: Tensor | None = None) -> None:
        self._logsumexp = logsumexp
        self.q = named["query"]
        self._heads = int(named["key"].shape[1])
        self.k, self.v = (x.repeat_interleave(self.q.shape[1] // x.shape[1], 1) for x in (named["key"], named["value"]))
        scale = named.get("scale")
        self.scale = float(1 / math.sqrt(self.q.shape[-1]) if scale is None else scale)
        self._causal = bool(named.get("is_causal"))
        bias = named.get("attn_bias", named.get("attn_mask"))
        shape = (*self.q.shape[:-1], self.k.shape[-2])
        self._bias = bias.expand(shape) if isinstance(bias, Tensor) and bias.numel() else None

    def parts(self) -> Iterator[tuple[int, slice, slice]]:
        """Return indices of all rows of Q: a sequence of the batch, all heads, and so many rows that memory suffices."""
        batch, heads, length = self.q.shape[:3]
        rows = max(1, _PART // max(1, heads * self.k.shape[-2]))
        for sequence in range(batch):
            for first in range(0, length, rows):
                yield sequence, slice(None), slice(first, first + rows)

    def scores(self, sequence: int, heads: slice, rows: slice) -> Tensor:
        """Return these rows of S, minus infinity where a key is not seen."""
        scores: Tensor = self.q[sequence, heads, rows] @ self.k[sequence].transpose(-2, -1) * self.scale
        if self._bias is not None:
            bias = self._bias[sequence, heads, rows]
            scores = scores.masked_fill(~bias, -math.inf) if bias.dtype is torch.bool else scores + bias
        if self._causal:
            own = torch.arange(rows.start, rows.start + scores.shape[-2], device=scores.device)
            scores = scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) > own[:, None], -math.inf)
        return scores

    def probabilities(self, sequence: int, heads: slice, rows: slice) -> Tensor:
        """Return these rows of P."""
        scores = self.scores(sequence, heads, rows)
        if self._logsumexp is not None:
            shares: Tensor = (scores - self._logsumexp[sequence, heads, rows].unsqueeze(-1)).exp()
            seen: Tensor = shares.nan_to_num(nan=0.0)
            return seen
        blind = scores.amax(-1, keepdim=True) == -math.inf
        found: Tensor = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        return found

    def over_heads(self, x: Tensor) -> Tensor:
        """Add up what heads give to the keys or values that they share."""
        summed: Tensor = x.unflatten(1, (self._heads, -1)).sum(2)
        return summed
