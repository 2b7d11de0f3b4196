"""Faults of gradients alone: formulas that lack a term, operands swapped, tensors of another step, scales, rounding, tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from . import Mutant
from .draws import Draws
from .numerics import bf16, flipped, fp16, kept
from .operators import CASES, EPS, SHARE
from .stores import element, line, tile
from .wrappers import Change, Function, another_step, backward_of, backward_through, by, chosen, each, mutant

Tensor = torch.Tensor
Formula = tuple[str, str, str, Callable[..., tuple[Tensor | None, ...]]]


def _phi(x: Tensor) -> Tensor:
    return 0.5 * (1 + (x / math.sqrt(2)).erf())


def _density(x: Tensor) -> Tensor:
    return (-x * x / 2).exp() / math.sqrt(2 * math.pi)


def _one_hot(x: Tensor, y: Tensor) -> Tensor:
    return F.one_hot(y, x.shape[1]).to(x.dtype)


def _layer_norm(
    g: Tensor, x: Tensor, w: Tensor, b: Tensor, *, mean: bool = True, projection: bool = True
) -> tuple[Tensor]:
    del b
    held = (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
    unit, own = (x - x.mean(-1, True)) * held, g * w
    return (held * (own - mean * own.mean(-1, True) - projection * unit * (own * unit).mean(-1, True)),)


def _batch_norm(g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor]:
    del b
    held = (x.var((0, 2, 3), correction=0, keepdim=True) + EPS).rsqrt()
    return (g * w[:, None, None] * held,)


def _attention(fault: str, g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5
    p = (q @ k.mT * scale).softmax(-1)
    inner = g @ v.mT
    s = p * (inner - (0 if fault == "row sum" else (inner * p).sum(-1, True)))
    s = s if fault == "scale" else s * scale
    return s @ k, (s if fault == "transpose" else s.mT) @ q, p.mT @ g


TERMS: list[Formula] = [
    ("div", "f32,bf16", "divides once by b", lambda g, a, b: (None, -g * a / b)),
    ("div", "bf16", "sign of b's", lambda g, a, b: (None, g * a / b / b)),
    ("sigmoid", "f32", "without 1 - s", lambda g, x: (g * x.sigmoid(),)),
    ("sigmoid", "bf16", "without s", lambda g, x: (g * (1 - x.sigmoid()),)),
    ("tanh", "f16", "1 - y", lambda g, x: (g * (1 - x.tanh()),)),
    ("log1p", "bf16", "of log", lambda g, x: (g / x,)),
    ("expm1", "bf16", "y for y + 1", lambda g, x: (g * x.expm1(),)),
    ("gelu", "f32,f16", "without the density", lambda g, x: (g * _phi(x),)),
    ("gelu", "bf16", "density without 1/sqrt(2 pi)", lambda g, x: (g * (_phi(x) + x * _density(x) * 2.5),)),
    ("silu", "f16", "without x s'", lambda g, x: (g * x.sigmoid(),)),
    ("erf", "f32", "2/pi for its root", lambda g, x: (g * 2 / math.pi * (-x * x).exp(),)),
    ("pow", "f32,bf16", "exponent of x not less by one", lambda g, x, y: (g * y * x.pow(y), None)),
    ("pow", "bf16", "without the logarithm", lambda g, x, y: (None, g * x.pow(y))),
    ("rsqrt", "f32", "square for cube", lambda g, x: (-0.5 * g / x,)),
    ("sqrt", "bf16", "without 1/2", lambda g, x: (g * x.rsqrt(),)),
    ("reciprocal", "f16", "sign", lambda g, x: (g / x.square(),)),
    ("var", "f32", "n for n - 1", lambda g, x: (g[:, None] * 2 * (x - x.mean(-1, True)) / x.shape[-1],)),
    ("var", "bf16", "without the mean", lambda g, x: (g[:, None] * 2 * x / (x.shape[-1] - 1),)),
    ("norm", "f32,f16", "without its division", lambda g, x: (g[:, None] * x,)),
    ("logsumexp", "f32", "not normalised", lambda g, x: (g[:, None] * x.exp(),)),
    ("softmax", "f32,bf16", "without the row's sum", lambda g, x: (g * x.softmax(-1),)),
    ("log_softmax", "f32", "without the row's sum", lambda g, x: (g - x.softmax(-1),)),
    ("cross_entropy", "f16", "not divided by rows", lambda g, x, y: (g * (x.softmax(-1) - _one_hot(x, y)),)),
    ("cross_entropy", "bf16", "without the target", lambda g, x, y: (g * x.softmax(-1) / len(x) + 0 * y[:, None],)),
    ("mse_loss", "bf16", "without 2", lambda g, a, b: (g * (a - b) / a.numel(), None)),
    ("mse_loss", "bf16", "b's of a's sign", lambda g, a, b: (None, g * 2 * (a - b) / a.numel())),
    ("bce", "f32,f16", "not divided", lambda g, x, y: (g * (x.sigmoid() - y), None)),
    ("layer_norm", "f32", "without the mean", lambda g, *xs: _layer_norm(g, *xs, mean=False)),
    ("layer_norm", "bf16", "without the projection", lambda g, *xs: _layer_norm(g, *xs, projection=False)),
    ("layer_norm", "f32,bf16", "weight's without normalising", lambda g, x, _w, _b: (None, (g * x).sum(0), None)),
    (
        "rms_norm",
        "f32",
        "without the projection",
        lambda g, x, w: (g * w * (x.square().mean(-1, True) + 1e-6).rsqrt(),),
    ),
    ("rms_norm", "f16", "weight's in the input's scale", lambda g, x, w: (None, (g * x).sum(0) + 0 * w)),
    ("batch_norm", "f32", "statistics as constants", _batch_norm),
    ("cumsum", "f16", "not reversed", lambda g, x: (g.cumsum(-1) + 0 * x,)),
    ("mean", "bf16", "not divided", lambda g, x: (g[:, None].expand_as(x),)),
    ("sdpa", "bf16", "scale missing", partial(_attention, "scale")),
    ("sdpa", "bf16", "without the row's sum", partial(_attention, "row sum")),
    ("sdpa", "f32,f16", "keys' not transposed", partial(_attention, "transpose")),
    ("rotary", "f32", "turned on", lambda g, x, c, s: (CASES["rotary"].right(g, c, s) + 0 * x,)),
    ("dropout", "f32,bf16", "not masked", lambda g, x, _m: (g / (1 - SHARE) + 0 * x,)),
    ("dropout", "bf16", "not scaled", lambda g, x, m: (g * m + 0 * x,)),
    ("clamp", "f32", "scaled by x", lambda g, x: (g * x * (x.abs() <= 1),)),
]
SWAPPED: list[Formula] = [
    ("mul", "f16", "a's for b's", lambda g, a, b: (g * a, g * b)),
    ("mul", "f16", "second dropped", lambda g, _a, _b: (None, 0 * g)),
    ("baddbmm", "bf16", "alpha dropped", lambda g, _c, _a, b: (None, g @ b.mT, None)),
    ("linear", "f32,f16", "bias without the last row", lambda g, _x, _w, _b: (None, None, g[:-1].sum(0))),
    ("linear", "bf16", "weight without the last row", lambda g, x, _w, _b: (None, g[:-1].T @ x[:-1], None)),
    (
        "conv2d",
        "f32",
        "kernel not turned",
        lambda g, _x, w, _b: (F.conv2d(g, w.transpose(0, 1), padding=1), None, None),
    ),
    ("embedding", "f32,bf16", "duplicates overwrite", lambda g, w, i: (torch.zeros_like(w).index_put((i,), g),)),
    ("index_select", "bf16", "duplicates overwrite", lambda g, x, i: (torch.zeros_like(x).index_put((i,), g),)),
    ("gather", "f32", "duplicates overwrite", lambda g, x, i: (torch.zeros_like(x).scatter(1, i, g),)),
    ("scatter_add", "f16", "source's scattered", lambda g, x, s, i: (None, g.gather(0, (i + 1) % len(x)) + 0 * s)),
    (
        "index_add",
        "bf16",
        "source's without the last",
        lambda g, _x, s, i: (None, g[i] * (torch.arange(len(s)) < 199)[:, None]),
    ),
    ("where", "bf16", "both take it", lambda g, _c, _a, _b: (None, g, g)),
    ("cat", "f32,f16", "parts' first columns", lambda g, a, b: (g[:, : a.shape[1]], g[:, : b.shape[1]])),
    ("roll", "f32", "rolled on", lambda g, x: (g.roll(5, -1) + 0 * x,)),
    ("masked_fill", "f32,bf16", "not masked", lambda g, x, _m: (g + 0 * x,)),
    (
        "cosine_similarity",
        "f32",
        "without the projection",
        lambda g, a, b: (g[:, None] * b / (a.norm(dim=-1) * b.norm(dim=-1))[:, None],),
    ),
    ("add", "f16", "b's dropped", lambda g, _a, _b: (None, 0 * g)),
]


def _scaled() -> list[Mutant]:
    spec: dict[str, tuple[Change, str]] = {
        "by 1.01": (
            each(lambda g: g * 1.01),
            "matmul:bf16 layer_norm gelu:f16 rms_norm:bf16 sdpa:f32,bf16 conv2d:bf16 cross_entropy exp:bf16",
        ),
        "by 1.0001": (each(lambda g: g * 1.0001), "linear softplus batch_norm silu"),
        "by 2": (each(lambda g: g * 2), "bmm mse_loss:f16 embedding:bf16 max_pool2d:f16"),
        "by 1/n": (each(lambda g: g / g.shape[0]), "linear:bf16 sum index_select:f16 group_norm:f32,bf16"),
        "first input's by 1.01": (each(lambda g: g * 1.01, (0,)), "mlp swiglu:bf16 block:f16 conv1d:f16 mul:f32,bf16"),
        "second input's by 1.001": (each(lambda g: g * 1.001, (1,)), "matmul sdpa_causal rms_norm conv_transpose2d"),
        "second input's by 2": (each(lambda g: g * 2, (1,)), "sdpa_gqa layer_norm:bf16 group_norm"),
    }
    found = []
    for detail, (change, words) in spec.items():
        for c, k in chosen(words):
            found.append(mutant(c, k, "mis-scaled gradient", f"gradient {detail}", backward_of(c.right, change)))
    return found


def _spoiled() -> list[Mutant]:
    spec: list[tuple[str, str, Change, str]] = [
        ("dropped last tile", "last 8 zero", each(tile("zero", 8)), "interpolate softmax:bf16 avg_pool2d:f16"),
        (
            "dropped last tile",
            "last row zero",
            each(tile("zero", 1, 0)),
            "matmul swiglu:f16 tanh:f16 adaptive_avg_pool2d:f32,bf16",
        ),
        ("stale last tile", "last 16 stale", each(tile("stale", 16)), "layer_norm linear:bf16 log:f16"),
        ("stale last tile", "last 32 copied", each(tile("copied", 32)), "bmm gelu:bf16 conv1d:f16"),
        (
            "one element",
            "the median x4",
            each(element(lambda g: g * 4, 0.5)),
            "matmul:bf16 softplus embedding:f16 conv2d:f32,bf16",
        ),
        (
            "one element",
            "a small one negated",
            each(element(torch.neg, 0.03)),
            "linear exp:f16 gelu:bf16 sdpa",
        ),
        ("one element", "bit 21 flipped", each(lambda g: flipped(g, 11, 21)), "matmul std batch_norm"),
        ("one element", "bit 25 flipped", each(lambda g: flipped(g, 11, 25)), "sum reciprocal swiglu"),
        ("one row or column", "a row by 1 percent", each(line(0, 1.01)), "matmul silu:bf16 sdpa:f16"),
        ("one row or column", "a column by 1e-4", each(line(-1, 1.0001)), "linear rms_norm"),
        ("double rounding", "in bf16", each(bf16), "matmul layer_norm softmax embedding prod mul:f16"),
        ("double rounding", "in fp16", each(fp16), "gelu conv_transpose2d cross_entropy"),
        ("reduced-precision store", "20 bits", each(lambda g: kept(g, 19)), "mul sigmoid div"),
        ("rounding mode", "10 bits, cut", each(lambda g: kept(g, 10, truncate=True)), "bmm conv2d log_softmax"),
        (
            "small magnitudes",
            "small ones lost",
            each(lambda g: g * (g.abs() > 1e-4)),
            "cross_entropy sdpa bce:f16 softmax:bf16",
        ),
    ]
    found = []
    for fault, detail, change, words in spec:
        for c, k in chosen(words):
            found.append(mutant(c, k, fault, f"gradient, {detail}", backward_of(c.right, change)))
    return found


def _zeros() -> list[Mutant]:
    zeros: Draws = lambda d: (d.planted(0.0, 32, 48, every=97),)  # noqa: E731
    quotient = by(lambda g, x: (g[:, None] * x.prod(-1, True) / x,))
    prod, norm = CASES["prod"], CASES["norm"]
    rows: Draws = lambda d: (d.planted(0.0, 16, 32, every=1),)  # noqa: E731
    by_norm = by(lambda g, x: (g[:, None] * x / x.norm(dim=-1, keepdim=True),))
    return [
        mutant(
            prod, "f32", "NaN handling", "gradient by division by zero", backward_of(prod.right, quotient), draws=zeros
        ),
        mutant(norm, "f32", "NaN handling", "gradient at zero", backward_of(norm.right, by_norm), draws=rows),
    ]


def mutants() -> list[Mutant]:
    """Return all of this family."""
    found = []
    for fault, rows in (("dropped term in backward", TERMS), ("swapped operand in backward", SWAPPED)):
        for name, kind, detail, formula in rows:
            wrong = backward_of(CASES[name].right, by(formula))
            found += [mutant(c, k, fault, f"gradient, {detail}", wrong) for c, k in chosen(f"{name}:{kind}")]
    for words, which in {
        "mul gelu layer_norm:bf16 softmax sdpa:bf16 sigmoid": (0,),
        "matmul bmm:bf16 linear swiglu": (1,),
    }.items():
        for c, k in chosen(words):
            found.append(
                mutant(c, k, "tensor of another step", "gradient, saved by another step", another_step(c.right, which))
            )
    tanh: Function = CASES["gelu_tanh"].right
    wrong = backward_through(CASES["gelu"].right, tanh)
    found.append(mutant(CASES["gelu"], "f32", "tanh for erf", "gradient, tanh's", wrong))
    wrong = backward_through(CASES["dropout"].right, lambda x, m: CASES["dropout"].right(x, m.roll(1, 0)))
    found.append(mutant(CASES["dropout"], "f32", "tensor of another step", "gradient, another mask", wrong))
    return [*found, *_scaled(), *_spoiled(), *_zeros()]
