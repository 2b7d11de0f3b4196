"""The checksums of what runs between matrix products: casts, sums, products, layer norms and softmax, forward and backward.

Each row of a result is linear in a row of an input, or sums to something known, whatever the numbers are; with random signs s:

``cast``               ``out . s = x . s``
``add``                ``out . s = a . s + alpha b . s``
``mul``                ``out . s = a . (b o s)`` for a row b, ``b (a . s)`` for a number, ``out . 1 = a . b`` else
``div``                the same of 1 / b; ``a . 1 = out . b`` else
``layer norm``         ``out . s = rstd (x . (w o s) - mean (w . s)) + b . s``, which holds mean and rstd, too
its backward           ``dx . 1 = 0``, ``dx . x = mean dx . 1`` and ``||dx|| <= rstd ||g|| max |w|``: of g is left what changes
                       neither the row's mean nor its size; ``db . s = sum of g . s``, and dw likewise
``log_softmax``        ``(out - x) . (s - mean s) = 0``: a row is shifted by one number
``softmax``            ``out . 1 = 1``
their backwards        ``dx . 1 = 0``, and a bound of ``||dx||``

These operators read and write as much as they compute: a checksum reads each number once, and writes none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import summing_dtype, unit_roundoff
from bitwitness.oracle.limits import ACCUMULATION, ROUNDING
from bitwitness.sense.invariant import Check, Invariant, Named, Signs, in_range, largest
from bitwitness.sense.rowreading import balance, bounded, is_readable, ones_for, pair_rows, signs_for, weighed
from bitwitness.stats.reader import KINDS
from bitwitness.tap.operators import OpCall

_U32 = 2.0**-24
_SUMMED = 4 * ACCUMULATION
_LARGE = 1 << 18
"""Elements up to which a weight's gradient is checked: that takes a product of two of them, element by element."""


def _cast(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    out, x = call.outputs[0], named["src"] if call.op == "copy_" else named["self"]
    if not is_readable(x) or x.shape != out.shape or torch.float64 in (x.dtype, out.dtype) or x.device != out.device:
        return None
    s, scale = signs_for(out, signs)
    before, size = weighed(x, s)
    return [balance("out s = x s", out, weighed(out, s)[0] - before, size, weight=scale)]


def _add(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    out, alpha = call.outputs[0], float(named.get("alpha", 1))
    s, scale = signs_for(out, signs)
    terms = [_term(named[name], out, s) for name in ("self", "other")]
    if terms[0] is None or terms[1] is None:
        return None
    (a, a_size), (b, b_size) = terms[0], terms[1]
    alpha = -alpha if call.op == "sub" else alpha
    expected, size = a + alpha * b, (a_size + abs(alpha) * b_size).expand(out.shape[:-1])
    return [balance("out s = a s + b s", out, weighed(out, s)[0] - expected, size, weight=scale)]


def _number(value: Any, out: Tensor) -> Any:
    """Return what all elements of a row share: a number, or a tensor to be broadcast to the result's rows; None else."""
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, Tensor) or value.device != out.device or value.dtype not in KINDS:
        return None
    if value.dim() and value.shape[-1] != 1:
        return None
    return (value if value.dim() == 0 else value[..., 0]).to(summing_dtype(out.dtype))


def _term(value: Any, out: Tensor, s: Tensor) -> tuple[Any, Any] | None:
    """Return ``value . s`` and the norm of each row, to be broadcast to the result's rows."""
    number = _number(value, out)
    if number is not None:
        return s.sum() * number, abs(number) * s.new_tensor(math.sqrt(len(s)))
    if not is_readable(value) or value.shape[-1] != len(s) or value.device != out.device:
        return None
    return weighed(value, s)


def _mul(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    out, a, b = call.outputs[0], named["self"], named["other"]
    if isinstance(b, Tensor) and isinstance(a, Tensor) and b.dim() and a.shape != out.shape:
        a, b = b, a
    if not is_readable(a) or a.shape != out.shape:
        return None
    if isinstance(b, Tensor) and b.shape == out.shape:
        return _product(out, a, b, "out 1 = a b")
    return _scaled(out, a, b, signs, inverse=False)


def _div(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    out, a, b = call.outputs[0], named["self"], named["other"]
    if named.get("rounding_mode") is not None or not is_readable(a) or a.shape != out.shape:
        return None
    if not (isinstance(b, Tensor) and b.shape == out.shape):
        return _scaled(out, a, b, signs, inverse=True)
    return _product(a, out, b, "a 1 = out b")


def _scaled(out: Tensor, a: Tensor, b: Any, signs: Signs, *, inverse: bool) -> list[Invariant] | None:
    """Check the product with one row for all, or with one number for each row; ``inverse``: the quotient."""
    s, scale = signs_for(out, signs)
    if isinstance(b, Tensor) and b.dim() and b.shape[-1] != 1:
        if b.numel() != len(s) or b.dtype not in KINDS or b.device != out.device:
            return None
        row = b.reshape(-1).to(s.dtype)
        row = row.reciprocal() if inverse else row
        expected, size = weighed(a, row * s)
        size = size * row.abs().amax()
    else:
        by = _number(b, out)
        if by is None or (inverse and isinstance(by, float) and not by):
            return None
        expected, size = weighed(a, s)
        expected, size = (expected / by, size / abs(by)) if inverse else (expected * by, size * abs(by))
    return [balance("out s = a (b s)", out, weighed(out, s)[0] - expected, size, weight=scale)]


def _product(out: Tensor, a: Tensor, b: Tensor, name: str) -> list[Invariant] | None:
    if not is_readable(b) or not a.dtype == b.dtype == out.dtype:
        return None
    expected, left, right = pair_rows(a, b)
    sums, _ = weighed(out, ones_for(out))
    return [balance(name, out, sums - expected, left * right, weight=1.0, lost=1.0)]


def _layer_norm(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    out, mean, rstd = call.outputs[:3]
    x, weight, bias = named["input"], named["weight"], named["bias"]
    if len(named["normalized_shape"]) != 1 or not is_readable(x):
        return None
    s, scale = signs_for(out, signs)
    w = s if weight is None else weight.to(s.dtype) * s
    mean, rstd = mean.reshape(x.shape[:-1]).to(s.dtype), rstd.reshape(x.shape[:-1]).to(s.dtype)
    sums, norms = weighed(x, w)
    expected = rstd * (sums - mean * w.sum())
    size = rstd.abs() * (norms + mean.abs() * math.sqrt(len(s))) * (w.abs().amax() / scale)
    if bias is not None:
        wide = bias.to(s.dtype)
        expected, size = expected + wide @ s, size + torch.linalg.vector_norm(wide)
    return [balance("out s = rstd (x - mean) w s + b s", out, weighed(out, s)[0] - expected, size, weight=scale)]


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
    found = []
    # half types are added up as they are, by some kernels
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


def _is_last(named: Named, out: Tensor) -> bool:
    return bool(named["dim"] % max(out.dim(), 1) == out.dim() - 1)


def _log_softmax(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    out, x = call.outputs[0], named["self"]
    if not _is_last(named, out) or not is_readable(x):
        return None
    s, scale = signs_for(out, signs)
    s = s - s.mean()
    (after, norms), (before, size) = weighed(out, s), weighed(x, s)
    return [balance("(out - x) s = 0", out, after - before, size + norms, weight=scale, lost=ROUNDING)]


def _softmax(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    out = call.outputs[0]
    if not _is_last(named, out):
        return None
    sums, norms = weighed(out, ones_for(out))
    # a row without anything is NaN, and not judged
    total = torch.where(torch.isfinite(norms), torch.ones_like(sums), norms)
    return [balance("out 1 = 1", out, sums - 1, total, weight=1.0, lost=math.sqrt(out.shape[-1]))]


def _softmax_backward(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    out, g, y = call.outputs[0], named["grad_output"], named["output"]
    if not _is_last(named, out) or not (is_readable(g) and is_readable(y)):
        return None
    sums, norms = weighed(out, ones_for(out))
    if call.op == "_log_softmax_backward_data":
        total, size = weighed(g, ones_for(g))
        size = size + total.abs()
    elif g.dtype is y.dtype:
        dots, size, length = pair_rows(g, y)
        size = length * (size + dots.abs() * math.sqrt(y.shape[-1]))
    else:
        return None
    # of results that are not finite nothing is known here: the forward's may be so
    size = torch.where(torch.isfinite(norms), size, norms)
    return [
        balance("dx 1 = 0", out, sums, size, weight=1.0, lost=math.sqrt(out.shape[-1])),
        bounded("|dx| <= what g allows", out, norms, size),
    ]


CHECKS: dict[str, Check] = {
    "_to_copy": _cast,
    "copy_": _cast,
    "add": _add,
    "sub": _add,
    "mul": _mul,
    "div": _div,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": _softmax_backward,
    "_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
}
"""Whose rows are checked, by operator."""
