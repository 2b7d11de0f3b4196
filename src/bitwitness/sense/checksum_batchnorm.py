"""The checksum of a batch norm: in a channel all is scaled and moved alike, and its mean and variance can be added up again.

``mean``    ``sum x / M``
``rstd``    ``1 / rstd^2 - eps = sum x^2 / M - mean^2``
``out``     ``out . s = w rstd (x . s - mean s . 1) + b s . 1``, of each sample's channel
``db, dw``  ``sum g`` and ``rstd (sum g x - mean sum g)``
``dx``      ``dx . s = w rstd (g . s - db s . 1 / M - dw rstd (x . s - mean s . 1) / M)``; without the two when evaluating

Ioffe and Szegedy, "Batch normalization" (2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.numerics import HALF, unit_roundoff
from bitwitness.oracle.limits import ACCUMULATION
from bitwitness.sense.invariant import Check, Invariant, Named, Signs, in_range, largest
from bitwitness.sense.rowreading import balance, is_readable, ones_for, pair_rows, signs_for, weighed
from bitwitness.tap.operators import OpCall

_ROOM = 8.0
_U32 = 2.0**-24


@dataclass(slots=True)
class _Norm:
    """A call's numbers by channel, ``[C]`` each, in the dtype of sums; samples' channels are rows, ``[N, C, P]``."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor
    eps: float

    @property
    def count(self) -> int:
        """Elements of a channel."""
        return self.x.shape[0] * self.x.shape[2]


def _rows(x: Tensor) -> Tensor | None:
    """Return ``[N, C, P]``, of ``[N, C]`` ``[1, C, N]``, copied where channels do not lie in one piece; None of narrow ones."""
    rows = x.contiguous().flatten(2) if x.dim() > 2 else x.t().contiguous()[None]
    return rows if is_readable(rows) else None


def _norm(named: Named, mean: Tensor, rstd: Tensor, *, training: bool) -> _Norm | None:
    x = _rows(named["input"])
    if x is None or mean.dtype in HALF:  # a half type's reciprocal deviation may be infinite
        return None
    eps = float(named["eps"] if "eps" in named else named["epsilon"])
    if not training:
        mean, rstd = named["running_mean"], (named["running_var"].to(torch.float64) + eps).rsqrt()
    wide = ones_for(x).dtype
    weight = torch.ones_like(mean) if named["weight"] is None else named["weight"]
    return _Norm(x, mean.to(wide), rstd.to(wide), weight.to(wide), eps)


def _forward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    out, training = call.outputs[0], bool(named["training"])
    norm, rows = _norm(named, *call.outputs[1:3], training=training), _rows(out)
    if norm is None or rows is None:
        return None
    s, scale = signs_for(rows, signs)
    width = math.sqrt(len(s))
    sums, norms = weighed(norm.x, s)
    factor, bias = norm.weight * norm.rstd, named["bias"]
    expected = factor * (sums - norm.mean * s.sum())
    size = factor.abs() * (norms + norm.mean.abs() * width)
    if bias is not None:
        expected, size = expected + bias.to(s.dtype) * s.sum(), size + bias.to(s.dtype).abs() * width
    found = [balance("out s = w rstd (x - mean) s + b s", rows, weighed(rows, s)[0] - expected, size, weight=scale)]
    return [*found, *_statistics(norm, norms)] if training else found


def _statistics(norm: _Norm, norms: Tensor) -> list[Invariant]:
    count = norm.count
    sums = weighed(norm.x, ones_for(norm.x))[0].sum(0) / count
    square = norms.square().sum(0) / count
    lost = _ROOM * ACCUMULATION * _U32 * math.sqrt(count)
    # one pass or two: what a kernel loses is relative to the squares, and its results are rounded
    variance = norm.rstd.square().reciprocal() - norm.eps
    residual, room = variance - (square - norm.mean.square()), lost * (square + variance.abs() + norm.eps)
    return [
        _judged("mean = sum of x / M", norm.mean - sums, lost * square.sqrt(), square),
        _judged("variance = sum of x^2 / M - mean^2", residual, room, square),
    ]


def _judged(name: str, residual: Tensor, room: Tensor, size: Tensor) -> Invariant:
    judged = in_range(size, torch.float32)
    return largest(name, residual.abs(), room + torch.finfo(torch.float32).smallest_normal, judged)


def _backward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    dx, dw, db = call.result[:3]
    training = bool(named.get("train", True))  # cuDNN's is called in training alone
    g = _rows(named["grad_out"] if "grad_out" in named else named["grad_output"])
    rstd = named["save_invstd"] if "save_invstd" in named else named["save_var"]
    norm = _norm(named, named["save_mean"], rstd, training=training)
    if norm is None or g is None or g.dtype is not norm.x.dtype:
        return None
    ones = ones_for(g)
    sums = weighed(g, ones)[0].sum(0)
    dots, g_norms, x_norms = pair_rows(g, norm.x)
    count, given, values = norm.count, *(torch.linalg.vector_norm(t, dim=0) for t in (g_norms, x_norms))
    width = math.sqrt(count)
    lost = _ROOM * ACCUMULATION * _U32 * width
    product = norm.rstd * (dots.sum(0) - norm.mean * sums)
    size = norm.rstd.abs() * given * (values + norm.mean.abs() * width)
    found = []
    if db is not None:
        found.append(_judged("db = sum of g", db - sums, _lost(lost, db) * given * width, given * width))
    if dw is not None:
        found.append(_judged("dw = rstd sum of g (x - mean)", dw - product, _lost(lost, dw) * size, size))
    rows = None if dx is None else _rows(dx)
    if rows is None:
        return found if dx is None else None
    s, scale = signs_for(rows, signs)
    factor, total = norm.weight * norm.rstd, s.sum()
    expected, bound = factor * weighed(g, s)[0], factor.abs() * g_norms
    if training:
        centred = norm.rstd * (weighed(norm.x, s)[0] - norm.mean * total)
        spread = norm.rstd.abs() * (x_norms + norm.mean.abs() * math.sqrt(len(s)))
        expected = expected - factor * (sums * total + product * centred) / count
        # the two sums are rounded, too: by what a channel's sum loses
        bound = bound + factor.abs() * (given * width * math.sqrt(len(s)) + size * spread) / count
    lost_in_sums = lost / unit_roundoff(rows.dtype)
    name = "dx s = w rstd (g - what a channel's mean and size take) s"
    return [*found, balance(name, rows, weighed(rows, s)[0] - expected, bound, weight=scale, lost=lost_in_sums)]


def _lost(lost: float, result: Tensor) -> float:
    return lost + _ROOM * unit_roundoff(result.dtype)


CHECKS: dict[str, Check] = {
    "native_batch_norm": _forward,
    "native_batch_norm_backward": _backward,
    "cudnn_batch_norm": _forward,
    "cudnn_batch_norm_backward": _backward,
}
"""Whose channels are checked, by operator."""
