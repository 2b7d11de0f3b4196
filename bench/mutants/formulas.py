"""Faults of formulas: epsilons of another size or at another place, and formulas that lose digits or overflow."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import Mutant
from .draws import Draws
from .operators import CASES, EPS
from .values import of_normals, within
from .wrappers import DTYPES, Function, fused, mutant, replaced

Tensor = torch.Tensor
Row = tuple[str, str, str, Function, Draws | None]


def affine(*shape: int, scale: float = 1.0, shift: float = 0.0, channels: int | None = None) -> Draws:
    """Return draws of what a norm takes: values, weights, biases."""
    count = channels or shape[-1]
    return lambda d: (
        d.normal(*shape, scale=scale, shift=shift),
        d.normal(count, shift=1, scale=0.2),
        d.normal(count, scale=0.2),
    )


def scaled(*shape: int, scale: float) -> Draws:
    """Return draws of what a root-mean-square norm takes."""
    return lambda d: (d.normal(*shape, scale=scale), d.normal(shape[-1], shift=1, scale=0.2))


def layer_norm(eps: float, *, outside: bool = False) -> Function:
    """Return a layer norm of this epsilon, outside of the root if told so."""

    def wrong(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        variance = x.var(-1, correction=0, keepdim=True)
        root = variance.sqrt() + eps if outside else (variance + eps).sqrt()
        return (x - x.mean(-1, keepdim=True)) / root * w + b

    return wrong


def rms_norm(eps: float, *, outside: bool = False) -> Function:
    """Return a root-mean-square norm of this epsilon, outside of the root if told so."""

    def wrong(x: Tensor, w: Tensor) -> Tensor:
        power = x.square().mean(-1, keepdim=True)
        return x / (power.sqrt() + eps if outside else (power + eps).sqrt()) * w

    return wrong


def batch_norm(eps: float) -> Function:
    """Return a batch norm of this epsilon."""
    return lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True, eps=eps)


def _epsilons() -> list[Row]:
    small, narrow = affine(64, 256, scale=0.02), affine(4, 16, 8, 8, scale=0.03, channels=16)
    return [
        ("layer_norm", "f32", "eps 1e-6", layer_norm(1e-6), None),
        ("layer_norm", "f32", "eps 1e-12", layer_norm(1e-12), None),
        ("layer_norm", "bf16", "eps 1e-6", layer_norm(1e-6), small),
        ("layer_norm", "f16", "eps 1e-4", layer_norm(1e-4), affine(64, 256, scale=0.1)),
        ("layer_norm", "f32", "eps outside the root", layer_norm(1e-5, outside=True), None),
        ("layer_norm", "bf16", "eps missing", layer_norm(0), small),
        ("rms_norm", "f32", "eps 1e-5", rms_norm(1e-5), None),
        ("rms_norm", "f32", "eps missing", rms_norm(0), scaled(64, 256, scale=0.1)),
        ("rms_norm", "bf16", "eps 1e-5", rms_norm(1e-5), scaled(64, 256, scale=0.01)),
        ("rms_norm", "f16", "eps outside the root", rms_norm(1e-6, outside=True), scaled(64, 256, scale=0.01)),
        ("rms_norm", "f32", "eps 1e-8", rms_norm(1e-8), scaled(64, 256, scale=0.3)),
        ("group_norm", "f32", "eps 1e-6", lambda x, w, b: F.group_norm(x, 4, w, b, 1e-6), None),
        (
            "group_norm",
            "bf16",
            "eps 1e-3",
            lambda x, w, b: F.group_norm(x, 4, w, b, 1e-3),
            affine(4, 16, 8, 8, scale=0.2, channels=16),
        ),
        ("batch_norm", "f32", "eps 1e-3", batch_norm(1e-3), None),
        ("batch_norm", "f32", "eps 1.1e-5", batch_norm(1.1e-5), narrow),
        ("batch_norm", "f16", "eps 1e-4", batch_norm(1e-4), narrow),
        (
            "cosine_similarity",
            "f32",
            "eps 1e-6",
            lambda a, b: F.cosine_similarity(a, b, -1, 1e-6),
            of_normals(1e-8, 1e-7),
        ),
        (
            "cosine_similarity",
            "f32",
            "eps added",
            lambda a, b: (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-6),
            of_normals(0.05, 0.05),
        ),
        ("rsqrt", "f32", "eps 1e-6", lambda x: (x + 1e-6).rsqrt(), None),
        ("std", "f32", "eps 1e-6", lambda x: (x.var(-1) + 1e-6).sqrt(), None),
        ("log", "f16", "eps 1e-4", lambda x: (x + 1e-4).log(), within(1e-3, 1e-1)),
    ]


def naive_variance(x: Tensor, correction: int = 1) -> Tensor:
    """Compute the variance by the mean of squares, which cancels."""
    n = x.shape[-1]
    return (x.square().mean(-1) - x.mean(-1).square()) * (n / (n - correction))


def naive_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Normalise by that variance."""
    return (x - x.mean(-1, True)) * (naive_variance(x, 0).clamp(min=0)[..., None] + EPS).rsqrt() * w + b


def _log_sigmoids(x: Tensor, y: Tensor) -> Tensor:
    p = x.sigmoid()
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


def _unstable() -> list[Row]:
    tiny, shifted = of_normals(1e-5), lambda d: (d.normal(16, 1024, shift=1000),)
    large: Draws = lambda d: (d.normal(64, 256, scale=40),)  # noqa: E731
    sure: Draws = lambda d: (d.normal(64, 512, scale=40), d.index(64, high=512))  # noqa: E731
    return [
        ("log1p", "f32", "log(1 + x)", lambda x: (1 + x).log(), within(1e-6, 1e-4)),
        ("log1p", "bf16", "log(1 + x)", lambda x: (1 + x).log(), within(1e-8, 1e-6)),
        ("expm1", "f32", "exp(x) - 1", lambda x: x.exp() - 1, tiny),
        ("expm1", "bf16", "exp(x) - 1", lambda x: x.exp() - 1, of_normals(1e-6)),
        ("softmax", "f32", "without the maximum", lambda x: x.exp() / x.exp().sum(-1, keepdim=True), large),
        ("softmax", "bf16", "without the maximum", lambda x: x.exp() / x.exp().sum(-1, keepdim=True), large),
        ("logsumexp", "f32", "without the maximum", lambda x: x.exp().sum(-1).log(), large),
        ("log_softmax", "f32", "log of softmax", lambda x: x.softmax(-1).log(), large),
        ("cross_entropy", "f32", "log of softmax", lambda x, y: F.nll_loss(x.softmax(-1).log(), y), sure),
        ("cross_entropy", "bf16", "softmax plus 1e-7", lambda x, y: F.nll_loss((x.softmax(-1) + 1e-7).log(), y), sure),
        ("var", "f32", "mean of squares", naive_variance, shifted),
        ("var", "f16", "mean of squares", naive_variance, lambda d: (d.normal(16, 1024, shift=1000),)),
        ("std", "f32", "mean of squares", lambda x: naive_variance(x).sqrt(), shifted),
        ("layer_norm", "f32", "mean of squares", naive_norm, affine(64, 256, shift=300)),
        ("layer_norm", "f16", "mean of squares", naive_norm, affine(64, 256, shift=500)),
        ("softplus", "f32", "log(1 + exp(x))", lambda x: (1 + x.exp()).log(), lambda d: (d.normal(64, 256, scale=8),)),
        ("softplus", "bf16", "log(1 + exp(x))", lambda x: (1 + x.exp()).log(), within(-30, -10)),
        (
            "bce",
            "f32",
            "logs of sigmoids",
            _log_sigmoids,
            lambda d: (d.normal(64, 64, scale=9), d.uniform(64, 64, grad=False)),
        ),
        (
            "pow",
            "f32",
            "exp(y log(x))",
            lambda x, y: (y * x.log()).exp(),
            lambda d: (d.normal(64, 256), d.grid(64, 256, step=1, low=-3, high=3)),
        ),
        (
            "pow",
            "f32",
            "exp2(y log2(x)), large",
            lambda x, y: (y * x.log2()).exp2(),
            lambda d: (d.uniform(64, 256, low=2, high=6), d.normal(64, 256, scale=8)),
        ),
        ("div", "f32", "by a reciprocal that overflows", lambda a, b: a * (1 / b), of_normals(1e-38, 1e-39)),
    ]


def _in_half() -> list[Mutant]:
    """Return kernels that don't widen: squares and sums overflow float16, or lose bfloat16's few digits."""
    rows: list[Row] = [
        ("mean", "f16", "sum overflows", lambda x: x.sum(-1) / x.shape[-1], lambda d: (d.normal(16, 1024, shift=90),)),
        (
            "rms_norm",
            "f16",
            "squares overflow",
            lambda x, w: x / (x.square().float().mean(-1, True) + 1e-6).sqrt().to(x.dtype) * w,
            scaled(64, 256, scale=120),
        ),
        (
            "norm",
            "f16",
            "squares overflow",
            lambda x: x.square().sum(-1).sqrt(),
            lambda d: (d.normal(16, 64, scale=70),),
        ),
        ("layer_norm", "bf16", "statistics in bf16", layer_norm(EPS), affine(64, 256, shift=3)),
        ("gelu", "bf16", "every step in bf16", lambda x: x * (((x * 0.70710678).erf() + 1) * 0.5), None),
        ("softplus", "f16", "every step in fp16", lambda x: (1 + x.exp()).log(), None),
    ]
    found = []
    for name, kind, detail, wrong, draws in rows:
        case = CASES[name]
        found.append(
            mutant(case, kind, "half-precision intermediates", detail, replaced(case.right, wrong), draws=draws)
        )
    return found


def _low_inside() -> list[Mutant]:
    """Return float32 kernels of which one step is done in bfloat16."""
    low = torch.bfloat16
    rows: list[Row] = [
        (
            "layer_norm",
            "f32",
            "mean",
            lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS) + (x.mean(-1, True) - x.mean(-1, True).to(low)),
            None,
        ),
        ("cross_entropy", "f32", "logits", lambda x, y: F.cross_entropy(x.to(low).to(x.dtype), y), None),
        (
            "softmax",
            "f32",
            "exponentials",
            lambda x: (e := (x - x.amax(-1, True)).exp().to(low).float()) / e.sum(-1, True),
            None,
        ),
        ("var", "f32", "mean", lambda x: (x - x.mean(-1, True).to(low)).square().sum(-1) / (x.shape[-1] - 1), None),
    ]
    return [
        mutant(CASES[n], k, "bf16 intermediates", f"{detail} in bf16", replaced(CASES[n].right, w), draws=d)
        for n, k, detail, w, d in rows
    ]


def mutants() -> list[Mutant]:
    """Return all of this family."""
    found = []
    for fault, rows in (("epsilon", _epsilons()), ("unstable formula", _unstable())):
        for name, kind, detail, wrong, draws in rows:
            ahead = fused(wrong) if DTYPES[kind] != torch.float32 else wrong
            found.append(mutant(CASES[name], kind, fault, detail, replaced(CASES[name].right, ahead), draws=draws))
    return [*found, *_in_half(), *_low_inside()]
