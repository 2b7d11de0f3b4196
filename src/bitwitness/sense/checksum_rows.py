"""The checksums of what runs between matrix products: casts, sums, products and softmax, forward and backward.

Each row of a result is linear in a row of an input, or sums to something known, whatever the numbers are; with random signs s:

``cast``               ``out . s = x . s``
``add``                ``out . s = a . s + alpha b . s``
``mul``                ``out . s = a . (b o s)`` for a row b, ``b (a . s)`` for a number, ``out . 1 = a . b`` else
``div``                the same of 1 / b; ``a . 1 = out . b`` else
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

from bitwitness.numerics import summing_dtype
from bitwitness.oracle.limits import ROUNDING
from bitwitness.sense.invariant import Check, Invariant, Named, Signs
from bitwitness.sense.rowreading import balance, bounded, is_readable, ones_for, pair_rows, signs_for, weighed
from bitwitness.stats.reader import KINDS
from bitwitness.tap.operators import OpCall


def cast(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    """Check a change of dtype, row by row."""
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


def _safe_softmax(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    out, x = call.outputs[0], named["self"]
    if not _is_last(named, out):
        return None
    sums, norms = weighed(out, ones_for(out))
    # a row that is masked as a whole gives zeros
    expected = (x.amax(-1) > -math.inf).to(sums.dtype)
    total = torch.where(torch.isfinite(norms), torch.ones_like(sums), norms)
    return [balance("out 1 = 1", out, sums - expected, total, weight=1.0, lost=math.sqrt(out.shape[-1]))]


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
    "_to_copy": cast,
    "add": _add,
    "sub": _add,
    "mul": _mul,
    "div": _div,
    "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": _softmax_backward,
    "_softmax": _softmax,
    "_safe_softmax": _safe_softmax,
    "_softmax_backward_data": _softmax_backward,
}
"""Whose rows are checked, by operator."""
