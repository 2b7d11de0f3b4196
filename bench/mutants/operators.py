"""The right functions, each of the inputs' dtype alone, and the inputs that they're usually given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .draws import Draws

Tensor = torch.Tensor
EPS = 1e-5
SHARE = 0.1  # of activations that dropout drops
CLASSES = 512


@dataclass(frozen=True)
class Case:
    """A right function and what it's called on."""

    name: str
    operator: str
    right: Callable[..., Tensor]
    draws: Draws


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head by the position's angles."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute LLaMA's feed-forward block."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def mlp(x: Tensor, one: Tensor, one_bias: Tensor, two: Tensor, two_bias: Tensor) -> Tensor:
    """Compute GPT's feed-forward block, with its residual."""
    return x + F.linear(F.gelu(F.linear(x, one, one_bias)), two, two_bias)


def heads(x: Tensor, count: int = 4) -> Tensor:
    """Split batch x time x width into batch x heads x time x width of a head."""
    split: Tensor = x.unflatten(-1, (count, -1))
    return split.transpose(1, 2)


def block(x: Tensor, weight: Tensor, bias: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    """Compute a causal attention block with its norm and its residual."""
    q, k, v = F.linear(F.layer_norm(x, x.shape[-1:], weight, bias, EPS), qkv).chunk(3, -1)
    told = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
    return x + F.linear(told.transpose(1, 2).flatten(2), out)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to everything."""
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to oneself and what came before."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend where the mask is true."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend, several heads of queries to one of keys and values."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def dropout(x: Tensor, keep: Tensor) -> Tensor:
    """Drop what isn't kept, and scale the rest."""
    return x * keep / (1 - SHARE)


def conv_transpose2d(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve, transposed, by strides of two."""
    return F.conv_transpose2d(x, weight, stride=2, padding=1, output_padding=1)


def _of(name: str, right: Callable[..., Tensor], draws: Draws, operator: str | None = None) -> Case:
    return Case(name, operator or name, right, draws)


PAIR: Draws = lambda d: (d.normal(64, 256), d.normal(64, 256))  # noqa: E731
ONE: Draws = lambda d: (d.normal(64, 256, scale=2),)  # noqa: E731
POSITIVE: Draws = lambda d: (d.uniform(64, 256, low=0.1, high=4),)  # noqa: E731
LONG: Draws = lambda d: (d.normal(16, 1024, shift=0.5),)  # noqa: E731
IMAGE: Draws = lambda d: (d.normal(2, 8, 16, 16),)  # noqa: E731
QKV: Draws = lambda d: (d.normal(2, 4, 64, 32), d.normal(2, 4, 64, 32), d.normal(2, 4, 64, 32))  # noqa: E731
LOGITS: Draws = lambda d: (d.normal(64, CLASSES, scale=2), d.index(64, high=CLASSES))  # noqa: E731

_ALL = [
    _of("add", torch.add, PAIR),
    _of("mul", torch.mul, PAIR),
    _of("div", torch.div, lambda d: (d.normal(64, 256), d.uniform(64, 256, low=0.5, high=3))),
    _of("exp", torch.exp, ONE),
    _of("tanh", torch.tanh, ONE),
    _of("sigmoid", torch.sigmoid, ONE),
    _of("gelu", F.gelu, ONE),
    _of("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), ONE, "gelu"),
    _of("silu", F.silu, ONE),
    _of("relu", F.relu, ONE),
    _of("softplus", F.softplus, ONE),
    _of("erf", torch.erf, ONE),
    _of("expm1", torch.expm1, ONE),
    _of("log", torch.log, POSITIVE),
    _of("log1p", torch.log1p, POSITIVE),
    _of("rsqrt", torch.rsqrt, POSITIVE),
    _of("sqrt", torch.sqrt, POSITIVE),
    _of("reciprocal", torch.reciprocal, POSITIVE),
    _of("pow", torch.pow, lambda d: (d.uniform(64, 256, low=0.2, high=3), d.normal(64, 256))),
    _of("sum", lambda x: x.sum(-1), LONG),
    _of("mean", lambda x: x.mean(-1), LONG),
    _of("var", lambda x: x.var(-1), LONG),
    _of("std", lambda x: x.std(-1), LONG),
    _of("prod", lambda x: x.prod(-1), lambda d: (d.uniform(64, 64, low=0.6, high=1.5),)),
    _of("cumsum", lambda x: x.cumsum(-1), LONG),
    _of("logsumexp", lambda x: x.logsumexp(-1), LONG),
    _of("amax", lambda x: x.amax(-1), LONG),
    _of("argmax", lambda x: x.argmax(-1), LONG),
    _of("norm", lambda x: torch.linalg.vector_norm(x, dim=-1), LONG),
    _of("topk", lambda x: x.topk(8, -1).values, LONG),
    _of("sort", lambda x: x.sort(-1).values, lambda d: (d.normal(32, 300),)),
    _of("softmax", lambda x: x.softmax(-1), ONE),
    _of("log_softmax", lambda x: x.log_softmax(-1), ONE),
    _of("cross_entropy", F.cross_entropy, LOGITS),
    _of("nll_loss", F.nll_loss, LOGITS),
    _of("mse_loss", F.mse_loss, PAIR),
    _of(
        "bce",
        F.binary_cross_entropy_with_logits,
        lambda d: (d.normal(64, 64, scale=3), d.uniform(64, 64, grad=False)),
        "binary_cross_entropy_with_logits",
    ),
    _of(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS),
        lambda d: (d.normal(64, 256, shift=0.3), d.normal(256, shift=1, scale=0.2), d.normal(256, scale=0.2)),
    ),
    _of(
        "rms_norm",
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
        lambda d: (d.normal(64, 256), d.normal(256, shift=1, scale=0.2)),
    ),
    _of(
        "group_norm",
        lambda x, w, b: F.group_norm(x, 4, w, b, EPS),
        lambda d: (d.normal(4, 16, 8, 8, shift=0.3), d.normal(16, shift=1, scale=0.2), d.normal(16, scale=0.2)),
    ),
    _of(
        "batch_norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True, eps=EPS),
        lambda d: (d.normal(8, 16, 6, 6, shift=0.3), d.normal(16, shift=1, scale=0.2), d.normal(16, scale=0.2)),
    ),
    _of("matmul", torch.matmul, lambda d: (d.normal(128, 512), d.normal(512, 384, scale=0.05))),
    _of("linear", F.linear, lambda d: (d.normal(64, 256), d.normal(384, 256, scale=0.06), d.normal(384, scale=0.1))),
    _of("bmm", torch.bmm, lambda d: (d.normal(4, 64, 96), d.normal(4, 96, 48))),
    _of(
        "baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=0.25),
        lambda d: (d.normal(4, 64, 48), d.normal(4, 64, 96), d.normal(4, 96, 48)),
    ),
    _of(
        "conv1d",
        lambda x, w: F.conv1d(x, w, padding=2),
        lambda d: (d.normal(4, 16, 64), d.normal(32, 16, 5, scale=0.1)),
    ),
    _of(
        "conv2d",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        lambda d: (d.normal(2, 8, 16, 16), d.normal(16, 8, 3, 3, scale=0.1), d.normal(16, scale=0.1)),
    ),
    _of("conv_transpose2d", conv_transpose2d, lambda d: (d.normal(2, 8, 10, 10), d.normal(8, 16, 3, 3, scale=0.1))),
    _of("sdpa", sdpa, QKV, "scaled_dot_product_attention"),
    _of("sdpa_causal", causal, QKV, "scaled_dot_product_attention"),
    _of("sdpa_masked", masked, lambda d: (*QKV(d), d.mask(2, 4, 64, 64, share=0.7)), "scaled_dot_product_attention"),
    _of(
        "sdpa_gqa",
        gqa,
        lambda d: (d.normal(2, 8, 64, 32), d.normal(2, 2, 64, 32), d.normal(2, 2, 64, 32)),
        "scaled_dot_product_attention",
    ),
    _of("embedding", lambda w, i: F.embedding(i, w), lambda d: (d.normal(300, 64), d.index(8, 64, high=300))),
    _of("index_select", lambda x, i: x.index_select(0, i), lambda d: (d.normal(64, 96), d.index(200, high=64))),
    _of("gather", lambda x, i: x.gather(1, i), lambda d: (d.normal(64, 96), d.index(64, 160, high=96))),
    _of(
        "scatter_add",
        lambda x, s, i: x.scatter_add(0, i, s),
        lambda d: (d.normal(32, 64), d.normal(200, 64), d.index(200, 64, high=32)),
    ),
    _of(
        "index_add",
        lambda x, s, i: x.index_add(0, i, s),
        lambda d: (d.normal(32, 64), d.normal(200, 64), d.index(200, high=32)),
    ),
    _of("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE),
    _of("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE),
    _of("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 5), IMAGE),
    _of("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGE),
    _of("clamp", lambda x: x.clamp(-1, 1), ONE),
    _of("where", torch.where, lambda d: (d.mask(64, 256, share=0.5), *PAIR(d))),
    _of("masked_fill", lambda x, m: x.masked_fill(m, -1e3), lambda d: (d.normal(64, 64), d.mask(64, 64))),
    _of("cat", lambda a, b: torch.cat((a, b), -1), lambda d: (d.normal(64, 100), d.normal(64, 60))),
    _of("roll", lambda x: x.roll(5, -1), ONE),
    _of("cosine_similarity", lambda a, b: F.cosine_similarity(a, b, dim=-1), PAIR),
    _of("dropout", dropout, lambda d: (d.normal(64, 256), d.mask(64, 256, share=1 - SHARE))),
    _of(
        "rotary",
        rotary,
        lambda d: (d.normal(2, 4, 64, 32), d.normal(64, 16).detach().cos(), d.normal(64, 16).detach().sin()),
    ),
    _of(
        "swiglu",
        swiglu,
        lambda d: (d.normal(64, 128), *(d.normal(256, 128, scale=0.1) for _ in "gu"), d.normal(128, 256, scale=0.1)),
    ),
    _of(
        "mlp",
        mlp,
        lambda d: (
            d.normal(64, 128),
            *(d.normal(256, 128, scale=0.1), d.normal(256, scale=0.1)),
            *(d.normal(128, 256, scale=0.1), d.normal(128, scale=0.1)),
        ),
    ),
    _of(
        "block",
        block,
        lambda d: (
            d.normal(2, 48, 64),
            *(d.normal(64, shift=1, scale=0.1), d.normal(64, scale=0.1)),
            *(d.normal(192, 64, scale=0.15), d.normal(64, 64, scale=0.15)),
        ),
        "attention block",
    ),
]
CASES = {case.name: case for case in _ALL}
