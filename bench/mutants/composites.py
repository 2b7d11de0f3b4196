"""Faults of attention and of small blocks: masks, scales, heads, rotations, gates and residuals."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from . import Mutant
from .draws import Draws
from .numerics import bf16, fp16
from .operators import CASES, EPS, SHARE, heads
from .wrappers import Function, chosen, fused, mutant, replaced

Tensor = torch.Tensor
Row = tuple[str, str, str, str, Function, Draws | None]
LOST = -math.inf


def scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Return the scores, scaled."""
    return q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Attend by hand, where the mask is true."""
    s = scores(q, k, scale)
    return (s if mask is None else s.masked_fill(~mask, LOST)).softmax(-1) @ v


def below(q: Tensor, k: Tensor, diagonal: int = 0) -> Tensor:
    """Return the causal mask, moved by a diagonal."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(diagonal)


def mask_by(value: float) -> Function:
    """Return an attention that adds a finite number where nothing may be seen."""
    return lambda q, k, v, mask: (scores(q, k) + torch.where(mask, 0.0, value)).softmax(-1) @ v


def causal_by(value: float) -> Function:
    """Return a causal attention that adds a finite number where nothing may be seen."""
    return lambda q, k, v: (scores(q, k) + torch.where(below(q, k), 0.0, value)).softmax(-1) @ v


def _strict(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = below(q, k, -1)
    mask[0, 0] = True
    return attend(q, k, v, mask)


def _last_tile_unmasked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[..., -8:] = True
    return attend(q, k, v, mask)


def _not_rescaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, two = (scores(q, half) for half in k.chunk(2, -2))
    top, both = one.amax(-1, True), torch.maximum(one.amax(-1, True), two.amax(-1, True))
    first, second = (one - top).exp(), (two - both).exp()
    upper, lower = v.chunk(2, -2)
    return (first @ upper + second @ lower) / (first.sum(-1, True) + second.sum(-1, True))


def _sum_not_rescaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    top, old = s.amax(-1, True), s[..., :32].amax(-1, True)
    held = (s - top).exp()
    return held @ v / ((s[..., :32] - old).exp().sum(-1, True) + held[..., 32:].sum(-1, True))


def _weights_in(kind: str) -> Function:
    low = bf16 if kind == "bf16" else fp16
    return lambda q, k, v: low(scores(q, k).softmax(-1)) @ v


def _attention() -> list[Row]:
    large: Draws = lambda d: (  # noqa: E731
        d.normal(2, 4, 48, 32, scale=150),
        d.normal(2, 4, 48, 32, scale=150),
        d.normal(2, 4, 48, 32),
        d.mask(2, 4, 48, 48, share=0.2) | torch.eye(48, dtype=torch.bool),
    )
    uneven: Draws = lambda d: (d.normal(2, 4, 24, 32), d.normal(2, 4, 64, 32), d.normal(2, 4, 64, 32))  # noqa: E731
    peaked: Draws = lambda d: tuple(d.normal(2, 4, 64, 32, scale=scale) for scale in (3, 3, 1))  # noqa: E731
    return [
        ("sdpa_causal", "f32,f16", "lost mask", "sees the next", lambda q, k, v: attend(q, k, v, below(q, k, 1)), None),
        ("sdpa_causal", "bf16", "lost mask", "sees the next", lambda q, k, v: attend(q, k, v, below(q, k, 1)), None),
        ("sdpa_causal", "bf16", "lost mask", "doesn't see itself", _strict, None),
        ("sdpa_causal", "f32,bf16", "lost mask", "none", attend, None),
        (
            "sdpa_causal",
            "f16",
            "wrong boundary",
            "aligned at the end",
            lambda q, k, v: attend(q, k, v, below(q, k, 40)),
            uneven,
        ),
        ("sdpa_causal", "bf16", "lost mask", "-10", causal_by(-10), None),
        ("sdpa_causal", "bf16", "lost mask", "-8", causal_by(-8), None),
        ("sdpa_masked", "f32", "lost mask", "-1e4, large scores", mask_by(-1e4), large),
        ("sdpa_masked", "bf16", "lost mask", "-1e4, large scores", mask_by(-1e4), large),
        ("sdpa_masked", "f16", "lost mask", "of the last 8 keys", _last_tile_unmasked, None),
        (
            "sdpa_masked",
            "f32",
            "lost mask",
            "of the first head for all",
            lambda q, k, v, m: attend(q, k, v, m[:, :1]),
            None,
        ),
        ("sdpa_masked", "f32,f16", "lost mask", "transposed", lambda q, k, v, m: attend(q, k, v, m.mT), None),
        (
            "sdpa_masked",
            "bf16",
            "lost mask",
            "after softmax",
            lambda q, k, v, m: scores(q, k).softmax(-1) * m @ v,
            None,
        ),
        ("sdpa", "f32,bf16", "missing scale", "1", lambda q, k, v: attend(q, k, v, scale=1.0), None),
        ("sdpa", "f16", "wrong constant", "1/d for its root", lambda q, k, v: attend(q, k, v, scale=1 / 32), None),
        (
            "sdpa",
            "bf16",
            "wrong constant",
            "scale by 1.01",
            lambda q, k, v: attend(q, k, v, scale=1.01 / 32**0.5),
            peaked,
        ),
        ("sdpa", "f32", "wrong constant", "scale 0.1768", lambda q, k, v: attend(q, k, v, scale=0.1768), None),
        ("sdpa", "bf16", "stale accumulator", "not rescaled at a new maximum", _not_rescaled, peaked),
        ("sdpa", "bf16", "stale accumulator", "sum not rescaled at a new maximum", _sum_not_rescaled, peaked),
        ("sdpa", "f32", "bf16 intermediates", "weights in bf16", _weights_in("bf16"), None),
        (
            "sdpa_gqa",
            "f32",
            "wrong index",
            "heads repeated the other way",
            lambda q, k, v: attend(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1)),
            None,
        ),
        (
            "sdpa_gqa",
            "bf16",
            "wrong index",
            "heads repeated the other way",
            lambda q, k, v: attend(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1)),
            None,
        ),
        (
            "sdpa_gqa",
            "f32,f16",
            "wrong index",
            "values of the first head",
            lambda q, k, v: attend(q, k.repeat_interleave(4, 1), v[:, :1]),
            None,
        ),
    ]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours in place of halves."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def gated(gate: Function) -> Function:
    """Return a feed-forward block with another gate."""
    return lambda x, g, u, d: F.linear(gate(F.linear(x, g)) * F.linear(x, u), d)


def mlp_by(activation: Function, *, second: float = 1.0, residual: float = 1.0) -> Function:
    """Return a feed-forward block with another activation, or another share of its bias or its residual."""
    return lambda x, w, b, v, c: x * residual + F.linear(activation(F.linear(x, w, b)), v, c * second)


def block_by(
    *, eps: float = EPS, diagonal: int = 0, scale: float | None = None, merged: bool = True, order: str = "qkv"
) -> Function:
    """Return a causal attention block with a fault."""

    def wrong(x: Tensor, weight: Tensor, bias: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        parts = dict(
            zip(order, F.linear(F.layer_norm(x, x.shape[-1:], weight, bias, eps), qkv).chunk(3, -1), strict=True)
        )
        q, k, v = (heads(parts[name]) for name in "qkv")
        told = attend(q, k, v, below(q, k, diagonal), scale)
        return x + F.linear(told.transpose(1, 2).flatten(2) if merged else told.reshape(x.shape), out)

    return wrong


def _blocks() -> list[Row]:
    keep = SHARE / (1 - SHARE)
    faint: Draws = lambda d: (d.normal(2, 48, 64, scale=0.01), *CASES["block"].draws(d)[1:])  # noqa: E731
    return [
        ("rotary", "bf16", "wrong index", "neighbours for halves", turned, None),
        ("rotary", "bf16", "wrong value", "turns back", lambda x, c, s: CASES["rotary"].right(x, c, -s), None),
        (
            "rotary",
            "f32,bf16",
            "wrong index",
            "positions from one",
            lambda x, c, s: CASES["rotary"].right(x, c.roll(-1, 0), s.roll(-1, 0)),
            None,
        ),
        (
            "rotary",
            "f32",
            "bf16 intermediates",
            "angles in bf16",
            lambda x, c, s: CASES["rotary"].right(x, bf16(c), bf16(s)),
            None,
        ),
        ("rotary", "f16", "lost mask", "last position not turned", _unturned, None),
        (
            "swiglu",
            "f16",
            "swapped operands",
            "gate and up",
            lambda x, g, u, d: CASES["swiglu"].right(x, u, g, d),
            None,
        ),
        (
            "swiglu",
            "bf16",
            "swapped operands",
            "gate and up",
            lambda x, g, u, d: CASES["swiglu"].right(x, u, g, d),
            None,
        ),
        ("swiglu", "bf16", "rough approximation", "GELU", gated(F.gelu), None),
        ("swiglu", "f16", "wrong value", "sigmoid", gated(torch.sigmoid), None),
        (
            "swiglu",
            "f32",
            "bf16 intermediates",
            "gate in bf16",
            gated(lambda x: x + (bf16(F.silu(x)) - x).detach()),
            None,
        ),
        ("mlp", "f32", "tanh for erf", "tanh's GELU", mlp_by(lambda x: F.gelu(x, approximate="tanh")), None),
        ("mlp", "bf16", "wrong value", "residual twice", mlp_by(F.gelu, residual=2), None),
        ("mlp", "f32,f16", "wrong value", "second bias lost", mlp_by(F.gelu, second=0), None),
        ("mlp", "f16", "wrong value", "relu", mlp_by(F.relu), None),
        ("mlp", "f32", "wrong constant", "residual by 1.0001", mlp_by(F.gelu, residual=1.0001), None),
        ("block", "bf16", "lost mask", "sees the next", block_by(diagonal=1), None),
        ("block", "f32", "epsilon", "1e-6", block_by(eps=1e-6), faint),
        ("block", "f32", "epsilon", "1e-6, usual inputs", block_by(eps=1e-6), None),
        ("block", "bf16", "missing scale", "of scores", block_by(scale=1.0), None),
        ("block", "f32,bf16", "wrong constant", "scale of the whole width", block_by(scale=64**-0.5), None),
        ("block", "f16", "wrong index", "heads not moved back", block_by(merged=False), None),
        ("block", "bf16", "swapped operands", "keys and values", block_by(order="qvk"), None),
        ("block", "f16", "swapped operands", "queries and keys", block_by(order="kqv"), None),
        ("dropout", "bf16", "missing scale", "not scaled", lambda x, m: x * m, None),
        ("dropout", "bf16", "lost mask", "inverted", lambda x, m: x * ~m / (1 - SHARE), None),
        ("dropout", "f32", "wrong constant", "scaled by 1 + p", lambda x, m: x * m * (1 + SHARE), None),
        ("dropout", "f16", "lost mask", "the last column kept", _column_kept, None),
        ("dropout", "f32", "wrong constant", "scaled by 1.1111", lambda x, m: x * m * 1.1111, None),
        ("dropout", "f32", "wrong value", "mean added", lambda x, m: x * m * (1 + keep) + keep * x.mean() * ~m, None),
    ]


def _unturned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = CASES["rotary"].right(x, cos, sin)
    return torch.cat((out[..., :-1, :], x[..., -1:, :]), -2)


def _column_kept(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat((x[:, :-1] * mask[:, :-1], x[:, -1:]), -1) / (1 - SHARE)


def mutants() -> list[Mutant]:
    """Return all of this family."""
    found = []
    for name, kind, fault, detail, wrong, draws in _attention() + _blocks():
        ahead = fused(wrong)
        if detail.endswith("in bf16"):  # gradients wouldn't pass the rounding
            ahead = replaced(CASES[name].right, ahead)
        found += [mutant(c, k, fault, detail, ahead, draws=draws) for c, k in chosen(f"{name}:{kind}")]
    return found
