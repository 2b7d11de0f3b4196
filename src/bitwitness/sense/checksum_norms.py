"""The checksum of batch and group norms: what is scaled and moved alike can be added up again, and so can mean and variance.

``G`` adds up over all that shares a mean, ``M`` numbers: a channel of all samples, or a sample's group of channels.

``mean``    ``G(x) / M``
``rstd``    ``1 / rstd^2 - eps = G(x^2) / M - mean^2``
``out``     ``out . s = w rstd (x . s - mean s . 1) + b s . 1``, of each sample's channel
``db, dw``  ``sum g`` and ``sum rstd (g x - mean g)`` of each channel
``dx``      ``dx . s = rstd (w g . s - G(w g) s . 1 / M - G(w rstd (x - mean) g) rstd (x . s - mean s . 1) / M)``; without
            the two when evaluating

Ioffe and Szegedy, "Batch normalization" (2015); Wu and He, "Group normalization" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    """A call's numbers in the dtype of sums; samples' channels are rows.

    Attributes
    ----------
    x
        ``[N, C, P]``
    mean, rstd, weight
        To be broadcast to ``[N, C]``.
    total
        ``G``: of ``[N, C]`` what shares a mean, to be broadcast to that again.
    count
        ``M``
    lost
        Share of what is added up that the sums lose.

    """

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor
    eps: float
    total: Callable[[Tensor], Tensor]
    count: int

    @property
    def lost(self) -> float:
        return _ROOM * ACCUMULATION * _U32 * math.sqrt(self.count)


def _rows(x: Tensor) -> Tensor | None:
    """Return ``[N, C, P]``, of ``[N, C]`` ``[1, C, N]``, copied where channels do not lie in one piece; None of narrow ones."""
    rows = x.contiguous().flatten(2) if x.dim() > 2 else x.t().contiguous()[None]
    return rows if is_readable(rows) else None


def _over_samples(values: Tensor) -> Tensor:
    return values.sum(0, keepdim=True)


def _over_group(values: Tensor, groups: int) -> Tensor:
    samples, channels = values.shape
    grouped = values.view(samples, groups, channels // groups)
    return grouped.sum(-1, keepdim=True).expand_as(grouped).reshape(samples, channels)


def _batch_norm(named: Named, mean: Tensor, rstd: Tensor, *, training: bool) -> _Norm | None:
    x = _rows(named["input"])
    if x is None or mean.dtype in HALF:  # a half type's reciprocal deviation may be infinite
        return None
    eps = float(named["eps"] if "eps" in named else named["epsilon"])
    if not training:
        mean, rstd = named["running_mean"], (named["running_var"].to(torch.float64) + eps).rsqrt()
    return _norm(x, named["weight"], mean, rstd, eps, _over_samples, x.shape[0] * x.shape[2])


def _group_norm(named: Named, mean: Tensor, rstd: Tensor) -> _Norm | None:
    x, (samples, channels, places), groups = named["input"], (named[k] for k in ("N", "C", "HxW")), named["group"]
    if mean.dtype in HALF or x.dim() < 3 or not samples * channels * places:
        return None
    rows, width = _rows(x), channels // groups
    if rows is None:
        return None
    mean, rstd = (t.view(samples, groups).repeat_interleave(width, 1) for t in (mean, rstd))
    eps = float(named.get("eps", 0.0))  # nobody asks the backward for it
    return _norm(rows, named["weight"], mean, rstd, eps, partial(_over_group, groups=groups), width * places)


def _norm(
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    total: Callable[[Tensor], Tensor],
    count: int,
) -> _Norm:
    wide = ones_for(x).dtype
    weight = mean.new_ones(x.shape[1]) if weight is None else weight
    return _Norm(x, mean.to(wide), rstd.to(wide), weight.to(wide), eps, total, count)


def _forward(norm: _Norm | None, call: OpCall, named: Named, signs: Signs, *, training: bool) -> list[Invariant] | None:
    out = call.outputs[0]
    rows = _rows(out)
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
    sums, square = (norm.total(t) / norm.count for t in (weighed(norm.x, ones_for(norm.x))[0], norms.square()))
    # one pass or two: what a kernel loses is relative to the squares, and its results are rounded
    variance = norm.rstd.square().reciprocal() - norm.eps
    residual, room = variance - (square - norm.mean.square()), norm.lost * (square + variance.abs() + norm.eps)
    return [
        _judged("mean = sum of x / M", norm.mean - sums, norm.lost * square.sqrt(), square),
        _judged("variance = sum of x^2 / M - mean^2", residual, room, square),
    ]


def _judged(name: str, residual: Tensor, room: Tensor, size: Tensor) -> Invariant:
    judged = in_range(size, torch.float32)
    return largest(name, residual.abs(), room + torch.finfo(torch.float32).smallest_normal, judged)


def _backward(
    norm: _Norm | None, g: Tensor | None, call: OpCall, signs: Signs, *, training: bool
) -> list[Invariant] | None:
    dx, dw, db = call.result[:3]
    if norm is None or g is None or g.dtype is not norm.x.dtype:
        return None
    sums = weighed(g, ones_for(g))[0]
    dots, g_norms, x_norms = pair_rows(g, norm.x)
    width, places, lost = math.sqrt(norm.count), math.sqrt(g.shape[2]), norm.lost
    along = norm.rstd * (dots - norm.mean * sums)
    spread = norm.rstd.abs() * (x_norms + norm.mean.abs() * places)
    found = []
    if db is not None:
        size = torch.linalg.vector_norm(g_norms, dim=0) * math.sqrt(len(g)) * places
        found.append(_judged("db = sum of g", db - sums.sum(0), lost * size + _rounded(db, g), size))
    if dw is not None:
        size = (g_norms * spread).sum(0)
        room = lost * size + _rounded(dw, g)
        found.append(_judged("dw = sum of rstd (x - mean) g", dw - along.sum(0), room, size))
    rows = None if dx is None else _rows(dx)
    if rows is None:
        return found if dx is None else None
    s, scale = signs_for(rows, signs)
    weight, rstd = norm.weight, norm.rstd
    expected, bound = weight * rstd * weighed(g, s)[0], (weight * rstd).abs() * g_norms
    if training:
        centred = rstd * (weighed(norm.x, s)[0] - norm.mean * s.sum())
        shared = norm.total(weight * sums) * s.sum() + norm.total(weight * along) * centred
        expected = expected - rstd * shared / norm.count
        # the two sums are rounded, too: by what adding so many up loses
        given = norm.total((weight * g_norms).square()).sqrt() * width * places
        bound = bound + rstd.abs() * (given + norm.total(weight.abs() * g_norms * spread) * spread) / norm.count
    lost_in_sums = lost / unit_roundoff(rows.dtype)
    name = "dx s = w rstd (g - what the mean and the size take) s"
    return [*found, balance(name, rows, weighed(rows, s)[0] - expected, bound, weight=scale, lost=lost_in_sums)]


def _rounded(result: Tensor, g: Tensor) -> Tensor:
    """Return what rounding a sum leaves: torch's kernel for channels-last images rounds it to the images' dtype first."""
    return _ROOM * max(unit_roundoff(result.dtype), unit_roundoff(g.dtype)) * result.abs()


def _batch_forward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    training = bool(named["training"])
    norm = _batch_norm(named, *call.outputs[1:3], training=training)
    return _forward(norm, call, named, signs, training=training)


def _batch_backward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    training = bool(named.get("train", True))  # cuDNN's is called in training alone
    g = named["grad_out"] if "grad_out" in named else named["grad_output"]
    rstd = named["save_invstd"] if "save_invstd" in named else named["save_var"]
    norm = _batch_norm(named, named["save_mean"], rstd, training=training)
    return _backward(norm, _rows(g), call, signs, training=training)


def _group_forward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    return _forward(_group_norm(named, *call.outputs[1:3]), call, named, signs, training=True)


def _group_backward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    norm = _group_norm(named, named["mean"], named["rstd"])
    return None if norm is None else _backward(norm, _rows(named["grad_out"]), call, signs, training=True)


CHECKS: dict[str, Check] = {
    "native_batch_norm": _batch_forward,
    "native_batch_norm_backward": _batch_backward,
    "cudnn_batch_norm": _batch_forward,
    "cudnn_batch_norm_backward": _batch_backward,
    "native_group_norm": _group_forward,
    "native_group_norm_backward": _group_backward,
}
"""Whose channels are checked, by operator."""
