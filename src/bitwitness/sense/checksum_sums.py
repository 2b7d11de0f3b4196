"""The checksums of what adds rows up, or picks and places them: sums, means, losses, embeddings and pools.

``sum``, ``mean``          over rows: ``out = sum(x . 1)``; over what is before them: ``out . s = sum(x . s)``
``embedding``              ``out . s = (W . s)[index]``
its backward               ``dW . s = sum of g . s by index``
``nll_loss``               computed again: it reads one number a row
its backward               ``dx . 1 = dx[target] = -w g / total`` and ``||dx||`` no more: there is nothing else in a row
backwards of pools         ``dx . 1 = g . 1`` of each plane: each number goes somewhere
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitwitness.numerics import unit_roundoff
from bitwitness.oracle.limits import ACCUMULATION, ROUNDING, accumulation_roundoff
from bitwitness.sense.invariant import Check, Invariant, Named, Signs, in_range, largest
from bitwitness.sense.rowreading import balance, bounded, is_readable, ones_for, signs_for, weighed
from bitwitness.tap.operators import OpCall

_ROOM = 4.0
_MEAN, _SUM = 1, 2
"""Reductions of a loss, as torch numbers them."""


def _reduced(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    x, out = named["self"], call.outputs[0]
    if not is_readable(x) or not x.numel() or not out.is_floating_point():
        return None
    dims = {d % x.dim() for d in named.get("dim") or range(x.dim())}
    before, keep = [d for d in sorted(dims) if d != x.dim() - 1], bool(named.get("keepdim"))
    over_rows = len(before) < len(dims)
    s, scale = (ones_for(x), 1.0) if over_rows else signs_for(x, signs)
    sums, norms = (None if over_rows else signs.last.of(x)) or weighed(x, s)
    if before:
        sums, norms = (t.sum(before, keepdim=keep) for t in (sums, norms))
    count = math.prod(x.shape[d] for d in dims) if call.op == "mean" else 1
    expected, size = sums / count, norms * (scale * math.sqrt(x.shape[-1]) / count)
    if over_rows:
        found = out.to(sums.dtype).reshape(expected.shape)
    else:
        wide = out.to(sums.dtype)
        found = wide @ s
        size = size + wide.norm(dim=-1) * scale * math.sqrt(x.shape[-1])
    return [_judged("out = sum of x", out, found - expected, size, terms=x.numel() // max(expected.numel(), 1))]


def _judged(name: str, out: Tensor, residual: Tensor, size: Tensor, *, terms: int) -> Invariant:
    """Judge sums by their terms' size, ``sum |x|`` or more."""
    u, info = unit_roundoff(out.dtype), torch.finfo(out.dtype)
    room = _ROOM * (ROUNDING * u + ACCUMULATION * accumulation_roundoff(out.dtype) * math.sqrt(terms))
    floor = ROUNDING * math.sqrt(terms) * info.smallest_normal
    return largest(name, residual.abs(), size * room + floor, in_range(size, out.dtype))


def _embedding(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    out, table, index = call.outputs[0], named["weight"], named["indices"]
    if not (is_readable(out) and is_readable(table)) or table.dtype is not out.dtype:
        return None
    s, scale = signs_for(out, signs)
    if table.numel() <= 2 * out.numel():
        expected, size = (t[index] for t in weighed(table, s))
    else:
        expected, size = weighed(table.index_select(0, index.reshape(-1)).view(out.shape), s)
    return [balance("out s = W[index] s", out, weighed(out, s)[0] - expected, size, weight=scale)]


def _embedding_backward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    out, g = call.outputs[0], named["grad_output"]
    if named["scale_grad_by_freq"] or not (is_readable(out) and is_readable(g)) or g.dtype is not out.dtype:
        return None
    s, scale = signs_for(out, signs)
    index = named["indices"].reshape(-1)
    used = (index != named["padding_idx"]).to(s.dtype)
    sums, norms = (t.reshape(-1) for t in weighed(g, s))
    rows = torch.stack([torch.where(used > 0, t, 0) for t in (sums, norms)] + [used], -1)
    expected, size, count = rows.new_zeros(out.shape[0], 3).index_add_(0, index, rows).unbind(-1)
    # a kernel may add the rows of one index up in their own dtype, one by one
    size = size * (1 + count / ROUNDING)
    return [balance("dW s = sum of g s", out, weighed(out, s)[0] - expected, size, weight=scale)]


def _picked(named: Named, classes: int) -> tuple[Tensor, Tensor]:
    """Return which class each row is of, and its weight, 0 for those that are ignored; flat."""
    target = named["target"].reshape(-1).long()  # bytes are allowed, too
    used, at = target != named["ignore_index"], target.clamp(0, classes - 1)
    weight = named["weight"]
    return at, (used.float() if weight is None else torch.where(used, weight[at], 0))


def _nll_loss(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    x = named["self"]
    if x.dtype is not torch.float32 or x.dim() > 2:
        return None
    out, total = call.outputs[:2]
    rows = x.reshape(-1, x.shape[-1])
    at, weight = _picked(named, rows.shape[-1])
    each = torch.where(weight != 0, -weight * rows.gather(1, at[:, None])[:, 0], 0)
    if named["reduction"] not in (_MEAN, _SUM):
        return [_judged("loss = -w x[target]", out, out.reshape(-1) - each, each.abs(), terms=1)]
    whole = weight.sum()
    by = whole if named["reduction"] == _MEAN else 1.0
    found = [_judged("loss = -sum of w x[target]", out, out - each.sum() / by, each.abs().sum() / by, terms=len(at))]
    if named["reduction"] == _MEAN:
        found.append(_judged("total = sum of w", total, total - whole, weight.abs().sum(), terms=len(at)))
    return found


def _nll_loss_backward(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    out = call.outputs[0]
    if not is_readable(out) or out.dim() > 2 or out.dtype not in (torch.float32, torch.float64):
        return None
    rows = out.reshape(-1, out.shape[-1])
    at, weight = _picked(named, rows.shape[-1])
    g = named["grad_output"].reshape(-1)
    expected = torch.where(weight != 0, -weight * g / (named["total_weight"] if named["reduction"] == _MEAN else 1), 0)
    sums, norms = weighed(rows, ones_for(rows))
    there = rows.gather(1, at[:, None])[:, 0]
    size = expected.abs()
    return [
        balance("dx 1 = -w g / total", rows, sums - expected, size, weight=1.0),
        _judged("dx[target] = -w g / total", out, there - expected, size, terms=1),
        bounded("|dx| <= |w g / total|", rows, norms, size),
    ]


def _pool_backward(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    out, g = call.outputs[0], named["grad_output"]
    if not (out.is_contiguous() and g.is_contiguous()) or g.dtype is not out.dtype:
        return None
    planes, given = out.flatten(-2), g.flatten(-2)
    if not is_readable(planes) or not given.shape[-1]:
        return None
    sums, _ = weighed(planes, ones_for(planes))
    wide = given.to(sums.dtype)
    # an element of the result may be added up in its own dtype, of as many as there are
    terms = min(given.shape[-1], planes.shape[-1])
    return [
        balance(
            "dx 1 = g 1", planes, sums - wide.sum(-1), wide.abs().sum(-1), weight=1.0,
            lost=float(terms if given.shape[-1] > planes.shape[-1] else ROUNDING * math.sqrt(terms)),
        )
    ]  # fmt: skip


def _average_backward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    """Check as above where no part of a window lies outside."""
    outside = any(named["padding"]) or named["ceil_mode"] or named["divisor_override"] is not None
    return None if outside else _pool_backward(call, named, signs)


CHECKS: dict[str, Check] = {
    "sum": _reduced,
    "mean": _reduced,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "_adaptive_avg_pool2d_backward": _pool_backward,
    "avg_pool2d_backward": _average_backward,
    "max_pool2d_with_indices_backward": _pool_backward,
}
"""Whose sums are checked, by operator."""
