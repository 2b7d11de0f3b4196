"""Dropout: what is kept is the input, scaled, what is not is nothing, and as much is kept as was asked for.

A mask cannot be drawn again, but it holds ones and zeros alone, and of n numbers ``n (1 - p)`` are kept, give or take
``sqrt(n p (1 - p))``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitwitness.numerics import unit_roundoff
from bitwitness.oracle.limits import ROUNDING
from bitwitness.sense.invariant import Check, Invariant, Named, Signs, counted, in_range, largest
from bitwitness.tap.operators import OpCall

_DEVIATIONS = 9.0
"""Standard deviations by which a share may be off: once in 10^18 masks."""
_ROOM = 4.0


def _kept(mask: Tensor, share: float) -> Invariant:
    """Check how many of a mask's elements are not zero."""
    count = mask.numel()
    off = (torch.count_nonzero(mask) - count * share).abs().to(torch.float32)[None]
    allowed = _DEVIATIONS * math.sqrt(count * share * (1 - share)) + _DEVIATIONS
    return largest("as many are kept as asked for", off, torch.full_like(off, allowed), torch.ones_like(off).bool())


def _mask(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    out, share = call.outputs[0], named.get("p", 0.5)
    if isinstance(share, Tensor) or not out.is_floating_point():
        return None
    # a number is its own square where it is 0 or 1 alone
    wrong = ((out * out != out).sum(dtype=torch.float32))[None]
    return [counted("each is 0 or 1", wrong), _kept(out, float(share))]


def _dropout(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    (out, mask), x, p = call.outputs[:2], named["input"], float(named["p"])
    if named["train"] is False or not 0 < p < 1 or not out.numel():
        return None
    found = _scaled(out, x, mask, 1 / (1 - p))
    return None if found is None else [*found, _kept(mask, 1 - p)]


def _dropout_backward(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    return _scaled(call.outputs[0], named["grad_output"], named["mask"], float(named["scale"]))


def _scaled(out: Tensor, x: Tensor, mask: Tensor, scale: float) -> list[Invariant] | None:
    if out.dtype is not x.dtype or x.shape != out.shape or mask.shape != out.shape or mask.dtype is not torch.bool:
        return None
    size = (x * mask).float().abs() * scale
    # of two roundings, and of a mask that a kernel multiplies by an infinity; nothing else is left of what is not kept
    residual = (out.float() - (x * mask).float() * scale).abs()
    room = _ROOM * ROUNDING * (unit_roundoff(out.dtype) + unit_roundoff(torch.float32))
    threshold = size * room + torch.finfo(out.dtype).smallest_normal
    found = (t.reshape(-1) for t in (residual, threshold, in_range(size, out.dtype)))
    return [largest("out = mask x / (1 - p)", *found)]


CHECKS: dict[str, Check] = {
    "bernoulli_": _mask,
    "native_dropout": _dropout,
    "native_dropout_backward": _dropout_backward,
}
"""Whose masks are checked, by operator."""
