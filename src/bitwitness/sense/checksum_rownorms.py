"""The checksums of norms of rows, layer norm and RMS norm: each is linear in its row once mean and deviation are known.

``forward``    ``out . s = rstd (x . (w o s) - mean (w . s)) + b . s``, and ``1 / rstd^2 - eps`` is the row's variance
``backward``   ``dx . 1 = 0``, ``dx . x = mean dx . 1`` and ``||dx|| <= rstd ||g|| max |w|``: of g is left what changes neither
               the row's mean nor its size; ``db . s = sum of g . s``, and dw likewise

Ba, Kiros and Hinton, "Layer normalization" (2016); Zhang and Sennrich, "Root mean square layer normalization" (2019).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitwitness.numerics import HALF, summing_dtype, unit_roundoff
from bitwitness.oracle.limits import ACCUMULATION
from bitwitness.sense.invariant import Check, Invariant, Named, Signs, in_range, largest
from bitwitness.sense.rowreading import balance, bounded, is_readable, ones_for, pair_rows, signs_for, weighed
from bitwitness.tap.operators import OpCall

_U32 = 2.0**-24
_SUMMED = 4 * ACCUMULATION
_VARIANCE = 2.0**-14
"""Of a row's mean square its variance may be off: kernels add up in one pass or two, and in float32."""
_LARGE = 1 << 18
"""Elements up to which a weight's gradient is checked: that takes a product of two of them, element by element."""


def _layer_norm(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    x = named["input"]
    if len(named["normalized_shape"]) != 1 or not is_readable(x):
        return None
    mean, rstd = (t.reshape(x.shape[:-1]) for t in call.outputs[1:3])
    return _normed(call.outputs[0], named, (mean, rstd), float(named["eps"]), signs)


def _rms_norm(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    x, out = named["input"], call.outputs[0]
    if len(named["normalized_shape"]) != 1 or not is_readable(x):
        return None
    rstd = call.outputs[1].reshape(x.shape[:-1])
    eps = torch.finfo(summing_dtype(x.dtype)).eps if named["eps"] is None else float(named["eps"])
    return _normed(out, named, (torch.zeros_like(rstd), rstd), eps, signs)


def _normed(
    out: Tensor, named: Named, moments: tuple[Tensor, Tensor], eps: float, signs: Signs
) -> list[Invariant] | None:
    """Check a row's norm; ``moments``: mean and reciprocal deviation of each row."""
    x, weight, bias = named["input"], named["weight"], named.get("bias")
    s, scale = signs_for(out, signs)
    w = s if weight is None else weight.to(s.dtype) * s
    mean, rstd = (t.to(s.dtype) for t in moments)
    sums, norms = weighed(x, w)
    expected = rstd * (sums - mean * w.sum())
    size = rstd.abs() * (norms + mean.abs() * math.sqrt(len(s))) * (w.abs().amax() / scale)
    if bias is not None:
        wide = bias.to(s.dtype)
        expected, size = expected + wide @ s, size + torch.linalg.vector_norm(wide)
    return [
        balance("out s = rstd (x - mean) w s + b s", out, weighed(out, s)[0] - expected, size, weight=scale),
        *_deviation(moments, norms.square() / len(s), eps),
    ]


def _deviation(moments: tuple[Tensor, Tensor], square: Tensor, eps: float) -> list[Invariant]:
    """Check what the rows are divided by, where it is kept in a type that holds it; ``square``: the mean of ``x^2``."""
    mean, rstd = (t.to(square.dtype) for t in moments)
    if moments[1].dtype not in (torch.float32, torch.float64):
        return []
    residual = rstd.square().reciprocal() - eps - (square - mean.square())
    room = _VARIANCE * (square + eps)
    judged = in_range(square, torch.float32) & (square + eps > torch.finfo(torch.float32).smallest_normal / _U32)
    return [largest("variance = mean of x^2 - mean^2", residual.abs(), room, judged)]


def _layer_norm_backward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    x, g, weight = named["input"], named["grad_out"], named["weight"]
    out = call.result[0]
    if len(named["normalized_shape"]) != 1 or out is None or not all(map(is_readable, (x, g, out))):
        return None
    if not x.dtype == out.dtype == g.dtype:
        return None
    dots, size, length = pair_rows(out, x)
    sums, _ = weighed(out, ones_for(out))
    mean, rstd = (named[name].reshape(x.shape[:-1]).to(sums.dtype) for name in ("mean", "rstd"))
    s, scale = signs_for(g, signs)
    given, g_norms = weighed(g, s)
    bound = rstd.abs() * g_norms * (1.0 if weight is None else weight.abs().amax().to(sums.dtype))
    lost = math.sqrt(x.shape[-1])  # elements alike are rounded alike
    # a row whose mean is most of it: mean and what is left are rounded in proportion to the row
    apart, rounded = 1 + rstd * length / lost, max(_U32, unit_roundoff(named["mean"].dtype)) / unit_roundoff(out.dtype)
    first, second = (bound * (1 + ACCUMULATION * apart**power * rounded) for power in (1, 2))
    # epsilon keeps a row from the size of its elements: so much of the gradient along the row is left
    left = bound * lost * (1 - rstd.square() * ((length / lost).square() - mean.square())).clamp(0, 1)
    along = ((rstd * (dots - mean * sums)).abs() - left).clamp_min(0)
    return [
        balance("dx 1 = 0", out, sums, first, weight=1.0, lost=lost),
        balance("dx x = mean dx 1", out, along, second, weight=1.0, lost=lost),
        bounded("|dx| <= rstd |g| max |w|", out, size, bound),
        *_of_weights(call, x, g, s, (mean, rstd), (given, g_norms, length + mean.abs() * lost), scale),
    ]


def _of_weights(
    call: OpCall,
    x: Tensor,
    g: Tensor,
    s: Tensor,
    moments: tuple[Tensor, Tensor],
    rows: tuple[Tensor, ...],
    scale: float,
) -> list[Invariant]:
    """Check the gradients of weight and bias; ``rows``: ``g . s``, the norms of g, and of what x deviates by."""
    (mean, rstd), (given, norms, spread) = moments, rows
    dw, db = call.result[1:]
    found: list[Invariant] = []
    if g.dtype in HALF:
        return found  # torch's CPU kernel adds them up in the half type, though the weights are wide
    if db is not None and db.dtype in (torch.float32, torch.float64):
        found.append(_summed("db s = sum of g s", db, db.to(s.dtype) @ s - given.sum(), norms * scale))
    if dw is not None and dw.dtype in (torch.float32, torch.float64) and g.numel() <= _LARGE:
        terms = rstd * (pair_rows((g * s).to(g.dtype), x)[0] - mean * given)
        size = rstd.abs() * norms * spread * scale
        found.append(_summed("dw s = sum of rstd (x - mean) g s", dw, dw.to(s.dtype) @ s - terms.sum(), size))
    return found


def _summed(name: str, result: Tensor, residual: Tensor, sizes: Tensor) -> Invariant:
    """Judge what was added up over rows, by the rows' sizes."""
    size, info = sizes.sum(), torch.finfo(result.dtype)
    lost = _SUMMED * _U32 * (math.sqrt(sizes.numel()) + math.sqrt(result.shape[-1]))
    judged = in_range(size, result.dtype)
    return largest(name, residual.abs()[None], (size * lost)[None] + info.smallest_normal, judged[None])


CHECKS: dict[str, Check] = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
}
"""Whose rows are checked, by operator."""
