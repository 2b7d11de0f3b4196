"""The checksum of a convolution: it is linear in its input, sample by sample, and its weight's gradient in each channel's.

``out``   ``sum s_n out_n = conv(sum s_n x_n) + b sum s_n``: one sample's convolution for the whole batch's
``dx``    ``sum s_n dx_n = the same of sum s_n g_n``
``dW``    ``sum s_k dW_k = the gradient for sum s_k g_k``: one channel's for a group's
``db``    ``sum of g``, added up again

Whatever the stride, padding, dilation, groups and transposition are: torch computes both sides. Of a batch of
few samples one channel is computed for each group's, by ``sum s_k W_k``; where both are few, it costs as much as the operator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import HALF, summing_dtype, unit_roundoff
from bitwitness.oracle.limits import ROUNDING, accumulation_roundoff, factor_convolution
from bitwitness.sense.invariant import Check, Invariant, Named, Signs, in_range, largest
from bitwitness.sense.matrixreading import UNDERFLOW
from bitwitness.tap.operators import OpCall

_FEWEST = 4
"""Samples in a batch, at least."""
_ROOM = 4.0
_KERNELS = 64.0
"""Units of roundoff that a convolution may lose of its terms' size: Winograd's kernels lose some ten, large tiles more."""
_CHUNK = 1 << 20
"""Elements that are widened at a time."""
_DTYPES = (torch.float32, torch.float64, *HALF)


def _forward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    x, weight, bias, out = named["input"], named["weight"], named["bias"], call.outputs[0]
    if not _fits(x, weight, out):
        return None
    if len(x) < _FEWEST:
        return _few_forward(out, named, signs)
    s, scale = signs(len(x), x.device, summing_dtype(out.dtype)), Signs.scale(len(x))
    (given, size), (found, norms) = _over_batch(x, s), _over_batch(out, s)
    wide = weight.to(s.dtype)
    expected = torch.convolution(given, wide, None, *_how(named))
    bound = torch.convolution(size, wide.abs(), None, *_how(named))
    if bias is not None:
        column = bias.to(s.dtype).view(1, -1, *[1] * (x.dim() - 2))
        expected, bound = expected + column * s.sum(), bound + column.abs() * math.sqrt(len(x))
    residual = found - expected
    return [_judged("sum of s out = conv(sum of s x)", out, residual, norms, bound, scale, added=weight[0, 0].numel())]


def _backward(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    g, x, weight = named["grad_output"], named["input"], named["weight"]
    if not _fits(g, x, weight):
        return None
    dx, dw, db = call.result
    found = [] if dx is None else [_input(dx, named, signs) if len(x) >= _FEWEST else _few_input(dx, named, signs)]
    if dw is not None:
        found.append(_weight(dw, named, signs))
    return found if db is None else [*found, _bias(db, g)]


def _few_forward(out: Tensor, named: Named, signs: Signs) -> list[Invariant]:
    """Check the convolution of few samples by one channel for each group's."""
    x, weight, bias, groups = named["input"], named["weight"], named["bias"], int(named["groups"])
    channels = out.shape[1] // groups
    s, scale = signs(channels, x.device, summing_dtype(out.dtype)), Signs.scale(channels)
    one, size = _of_channels(weight, s, groups, inner=bool(named["transposed"]))
    found, norms = (t.view(len(x), groups, *out.shape[2:]) for t in _contracted(_in_groups(out, groups), s))
    wide = x.to(s.dtype)
    expected, bound = (
        torch.convolution(wide, one, None, *_how(named)),
        torch.convolution(wide.abs(), size, None, *_how(named)),
    )
    if bias is not None:
        sums, norm = (t.view(1, groups, *[1] * (x.dim() - 2)) for t in _contracted(bias.view(groups, channels, 1), s))
        expected, bound = expected + sums, bound + norm
    name = "sum of s out, by channel, = conv by sum of s W"
    return [_judged(name, out, found - expected, norms, bound, scale, added=weight[0, 0].numel())]


def _few_input(dx: Tensor, named: Named, signs: Signs) -> Invariant:
    g, weight, groups = named["grad_output"], named["weight"], int(named["groups"])
    channels = dx.shape[1] // groups
    s, scale = signs(channels, g.device, summing_dtype(g.dtype)), Signs.scale(channels)
    one, size = _of_channels(weight, s, groups, inner=not named["transposed"])
    found, norms = (t.view(len(dx), groups, *dx.shape[2:]) for t in _contracted(_in_groups(dx, groups), s))
    wide, shape = g.to(s.dtype), torch.empty_like(found)
    expected = _again(named, wide, shape, one, of_input=True)
    bound = _again(named, wide.abs(), shape, size, of_input=True)
    name = "sum of s dx, by channel, = that by sum of s W"
    return _judged(name, dx, found - expected, norms, bound, scale, added=weight[0, 0].numel())


def _in_groups(x: Tensor, groups: int) -> Tensor:
    return x.reshape(x.shape[0] * groups, x.shape[1] // groups, -1)


def _of_channels(weight: Tensor, s: Tensor, groups: int, *, inner: bool) -> tuple[Tensor, Tensor]:
    """Return a weight with one channel for each group's, and the norms; ``inner``: its second dimension's, else its first's."""
    if inner:
        found = _contracted(weight.flatten(2), s)
        return found[0].view(len(weight), 1, *weight.shape[2:]), found[1].view(len(weight), 1, *weight.shape[2:])
    found = _contracted(weight.reshape(groups, len(weight) // groups, -1), s)
    return found[0].view(groups, *weight.shape[1:]), found[1].view(groups, *weight.shape[1:])


def _fits(*tensors: Tensor) -> bool:
    one = tensors[0]
    return one.dtype in _DTYPES and all(
        t.dtype is one.dtype and t.layout is torch.strided and t.numel() for t in tensors
    )


def _how(named: Named) -> list[Any]:
    """Return a convolution's settings, in the order in which torch takes them."""
    return [named[name] for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]


def _again(named: Named, g: Tensor, x: Tensor, weight: Tensor, *, of_input: bool) -> Tensor:
    """Return the gradient of the input, or of the weight, of one sample or channel, by torch's own operator."""
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        g, x, weight, None, *_how(named), [of_input, not of_input, False]
    )
    return found[0] if of_input else found[1]


def _input(dx: Tensor, named: Named, signs: Signs) -> Invariant:
    g, weight = named["grad_output"], named["weight"]
    s = signs(len(g), g.device, summing_dtype(g.dtype))
    (given, size), (found, norms) = _over_batch(g, s), _over_batch(dx, s)
    wide, shape = weight.to(s.dtype), torch.empty_like(found)
    expected = _again(named, given, shape, wide, of_input=True)
    bound = _again(named, size, shape, wide.abs(), of_input=True)
    residual, scale = found - expected, Signs.scale(len(g))
    return _judged("sum of s dx = conv(sum of s g)", dx, residual, norms, bound, scale, added=weight[0, 0].numel())


def _weight(dw: Tensor, named: Named, signs: Signs) -> Invariant:
    g, x, weight, groups = named["grad_output"], named["input"], named["weight"], int(named["groups"])
    channels = g.shape[1] // groups
    s = signs(channels, g.device, summing_dtype(g.dtype))
    given, size = _contracted(g.reshape(len(g) * groups, channels, -1), s)
    one = given.view(len(g), groups, *g.shape[2:])
    # Cauchy and Schwarz over all samples and places
    by_group = _channels(size.view(len(g), groups, -1))
    by_channel = _channels(x).view(groups, -1)
    if named["transposed"]:  # [C, K / groups, ...]: the weight's first channels are the input's
        like, flat = weight[:, :1], dw.reshape(len(dw), channels, -1)
        bound = (by_channel * by_group[:, None]).reshape(-1, 1)
    else:  # [K, C / groups, ...]
        like, flat = weight[::channels], dw.reshape(groups, channels, -1)
        bound = (by_channel * by_group[:, None])[..., None].expand(-1, -1, weight[0, 0].numel()).flatten(1)
    found, norms = _contracted(flat, s)
    expected = _again(named, one, x.to(s.dtype), like.to(s.dtype), of_input=False).reshape(found.shape)
    residual, bound, scale = (found - expected)[None], bound.expand_as(found)[None], Signs.scale(channels)
    terms = given.numel() // groups
    return _judged(
        "sum of s dW = that of sum of s g", dw, residual, norms[None], bound, scale, terms=terms, added=len(g)
    )


def _bias(db: Tensor, g: Tensor) -> Invariant:
    wide = summing_dtype(g.dtype)
    expected, terms = g.flatten(2).sum((0, 2), dtype=wide), g.numel() // g.shape[1]
    size = (_channels(g) * math.sqrt(terms))[None, :, None]
    residual = (db.to(wide) - expected)[None, :, None]
    return _judged("db = sum of g", db, residual, size, size, 1.0, terms=terms, added=len(g))


def _over_batch(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``sum s_n x_n`` and the norm over the samples, as one sample's batch, ``[1, *x.shape[1:]]``."""
    last = x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()
    lies = x.movedim(1, -1) if last else x
    found = [t.view(1, *lies.shape[1:]) for t in _contracted(lies.reshape(1, len(x), -1), s)]
    return (found[0].movedim(-1, 1), found[1].movedim(-1, 1)) if last else (found[0], found[1])


def _contracted(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``s @ x`` and the norms across, ``[B, P]`` each, of ``[B, M, P]``, in s's dtype."""
    width = max(1, _CHUNK // (x.shape[0] * x.shape[1]))
    parts, ones = [], torch.ones_like(s)
    for part in [x] if x.dtype is s.dtype and x.device.type != "cpu" else x.split(width, -1):
        wide = part.to(s.dtype)
        # a norm across memory is slow
        parts.append((torch.matmul(s, wide), torch.matmul(ones, wide.square()).sqrt_()))
    sums, norms = (torch.cat(both, -1) for both in zip(*parts, strict=True))
    return sums, norms + UNDERFLOW * math.sqrt(x.shape[1])


def _channels(x: Tensor) -> Tensor:
    """Return the norms of the channels of ``[N, C, ...]``, over all samples and places, ``[C]``."""
    each = torch.linalg.vector_norm(x.flatten(2), dim=-1, dtype=summing_dtype(x.dtype))
    norms: Tensor = torch.linalg.vector_norm(each, dim=0)
    return norms


def _judged(
    name: str, out: Tensor, residual: Tensor, norms: Tensor, bound: Tensor, scale: float, *, terms: int = 1, added: int
) -> Invariant:
    """Judge residuals, ``[1, rows, ...]``, by the result's norms and by a bound of its terms' size, without the weights' scale.

    ``terms``: of the sum of a weight's gradient; ``added``: how many numbers a kernel may add up in the result's own dtype.
    """
    u, info = unit_roundoff(out.dtype), torch.finfo(out.dtype)
    lost = (_KERNELS + math.sqrt(terms) / 4) * accumulation_roundoff(out.dtype) + _ROOM * factor_convolution(residual)
    if out.dtype in HALF and out.is_cpu:
        lost += math.sqrt(added) * u  # torch 2.13 scatters float16 so, and bfloat16 on CPUs without it
    norms = torch.where(norms < bound, norms, bound)  # a wrong result shall not widen its threshold
    floor = ROUNDING * math.sqrt(len(out)) * info.smallest_normal
    threshold = scale * (_ROOM * ROUNDING * u * norms + lost * bound + floor)
    judged = in_range(bound, out.dtype)
    return largest(name, residual.abs(), threshold, judged, per_row=residual[0, 0].numel())


CHECKS: dict[str, Check] = {"convolution": _forward, "convolution_backward": _backward}
"""Whose channels are checked, by operator."""
