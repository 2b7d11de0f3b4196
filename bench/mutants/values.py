"""Faults of single values: subnormals, NaN and infinity, boundaries, tiny magnitudes, constants, rough approximations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from . import Mutant
from .draws import Draw, Draws
from .numerics import flushed, kept
from .operators import CASES
from .wrappers import Change, Function, backward_of, each, fused, mutant, replaced, stored, taken

Tensor = torch.Tensor
NAN, INF = math.nan, math.inf


def of_normals(*scales: float) -> Draws:
    """Return draws of normal numbers, one tensor a scale."""
    return lambda d: tuple(d.normal(64, 256, scale=scale) for scale in scales)


def within(low: float, high: float) -> Draws:
    """Return draws of uniform numbers."""
    return lambda d: (d.uniform(64, 256, low=low, high=high),)


def with_value(value: float, shape: tuple[int, ...] = (64, 256), *, grad: bool = True) -> Draws:
    """Return draws where each 97th is the value."""
    return lambda d: (d.planted(value, *shape, grad=grad),)


def rows_masked(d: Draw) -> tuple[Tensor, ...]:
    """Draw normal numbers, every 16th row minus infinity: scores of which all are masked."""
    x = d.normal(64, 32, grad=False)
    x[::16] = -INF
    return (x.requires_grad_(),)


def _flushes() -> list[Mutant]:
    results: list[tuple[str, str, Draws]] = [
        ("mul", "f32", of_normals(1e-20, 1e-19)),
        ("mul", "bf16", of_normals(1e-20, 1e-19)),
        ("mul", "f16", of_normals(1e-3, 3e-2)),
        ("div", "f32", lambda d: (d.normal(64, 256, scale=1e-20), d.uniform(64, 256, low=1e17, high=1e19))),
        ("add", "bf16", of_normals(1e-38, 1e-38)),
        ("exp", "f32", within(-103, -80)),
        ("exp", "f16", within(-16, -6)),
        ("sigmoid", "f16", within(-16, -6)),
        ("softmax", "f16", lambda d: (d.normal(64, 256, scale=4),)),
        ("softmax", "bf16", lambda d: (d.normal(64, 256, scale=30),)),
        ("matmul", "f16", lambda d: (d.normal(64, 128, scale=1e-3), d.normal(128, 96, scale=1e-3))),
        ("silu", "f16", within(-16, -6)),
    ]
    found = [
        mutant(
            CASES[name], kind, "flushed subnormals", "of the result", stored(CASES[name].right, flushed), draws=draws
        )
        for name, kind, draws in results
    ]
    inputs: list[tuple[str, str, Draws]] = [
        ("sqrt", "f32", within(1e-41, 1e-39)),
        ("log", "f32", within(1e-41, 1e-39)),
        ("reciprocal", "bf16", within(4e-39, 2e-38)),
        ("rsqrt", "f32", within(1e-41, 1e-39)),
        ("log", "f16", within(1e-6, 1e-4)),
        ("relu", "f16", of_normals(1e-4)),
        ("add", "f32", of_normals(1e-38, 1e-38)),
        ("clamp", "bf16", of_normals(1e-38)),
        ("sum", "f16", lambda d: (d.normal(16, 512, scale=2e-5),)),
        ("mul", "f32", of_normals(1e-39, 1e6)),
    ]
    for name, kind, draws in inputs:
        wrong = taken(CASES[name].right, flushed)
        found.append(mutant(CASES[name], kind, "flushed subnormals", "of the input", wrong, draws=draws))
    gradients: list[tuple[str, str, Draws]] = [
        ("mul", "f16", of_normals(1e-5, 1e-5)),
        ("mul", "f32", of_normals(1e-38, 1e-38)),
        ("sigmoid", "f16", within(-14, -7)),
        ("mse_loss", "f16", of_normals(0.3, 0.3)),
        ("exp", "bf16", within(-92, -84)),
    ]
    for name, kind, draws in gradients:
        wrong = backward_of(CASES[name].right, each(flushed))
        found.append(mutant(CASES[name], kind, "flushed subnormals", "of the gradient", wrong, draws=draws))
    return found


def _clamped(x: Tensor) -> Tensor:
    return torch.fmin(torch.fmax(x, torch.full_like(x, -1)), torch.ones_like(x))


def _top(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=-1e4).topk(8, -1).values


def _nonfinite() -> list[Mutant]:
    short = (32, 256)
    kinds: dict[str, list[tuple[str, str, Function, Draws]]] = {
        "NaN handling": [
            ("amax", "f32", lambda x: x.nan_to_num(nan=-1e4).amax(-1), with_value(NAN, short)),
            ("relu", "f32", lambda x: torch.fmax(x, torch.zeros_like(x)), with_value(NAN)),
            ("relu", "bf16", lambda x: x * (x > 0), with_value(-INF)),
            ("clamp", "bf16", _clamped, with_value(NAN)),
            (
                "max_pool2d",
                "f32",
                lambda x: F.max_pool2d(x.nan_to_num(nan=-1e4), 3, 2, 1),
                with_value(NAN, (2, 4, 16, 16)),
            ),
            ("topk", "f16", _top, with_value(NAN, short)),
            ("sum", "f32", lambda x: x.nansum(-1), with_value(NAN, short)),
            ("mean", "bf16", lambda x: x.nanmean(-1), with_value(NAN, short)),
            ("argmax", "f32", lambda x: x.nan_to_num(nan=-1e4).argmax(-1), with_value(NAN, short)),
            ("softmax", "f32", lambda x: x.softmax(-1).nan_to_num(), rows_masked),
            ("softmax", "bf16", lambda x: x.softmax(-1).nan_to_num(), with_value(NAN, (97, 64))),
            ("gelu_tanh", "f32", lambda x: F.gelu(x.nan_to_num(nan=0), approximate="tanh"), with_value(NAN)),
            ("sort", "f32", lambda x: x.nan_to_num(nan=0).sort(-1).values, with_value(NAN, short)),
        ],
        "infinity handling": [
            ("tanh", "f32", lambda x: ((2 * x).exp() - 1) / ((2 * x).exp() + 1), with_value(60)),
            ("sigmoid", "bf16", lambda x: x.exp() / (1 + x.exp()), with_value(INF)),
            ("softplus", "f16", lambda x: (1 + x.exp()).log(), with_value(INF)),
            ("silu", "f32", lambda x: x.clamp(-1e4, 1e4) * x.sigmoid(), with_value(INF)),
            ("logsumexp", "f32", lambda x: x.clamp(max=1e4).logsumexp(-1), with_value(INF, short)),
            ("exp", "f16", lambda x: x.clamp(max=11.0).exp(), within(8, 13)),
        ],
    }
    found = []
    for fault, rows in kinds.items():
        for name, kind, ahead, draws in rows:
            wrong = replaced(CASES[name].right, ahead)
            found.append(mutant(CASES[name], kind, fault, "a non-finite lost or made", wrong, draws=draws))
    return found


def gated_by(gate: Callable[[Tensor], Tensor]) -> Change:
    """Let the gradient pass where the gate, or as far as its factor, says."""
    return lambda _grads, inputs, grad: [grad * gate(inputs[0]).to(grad.dtype)]


def _boundaries() -> list[Mutant]:
    steps: Draws = lambda d: (d.grid(64, 256, step=0.25, low=-8, high=8),)  # noqa: E731
    found = []
    gates: list[tuple[str, str, str, Callable[[Tensor], Tensor]]] = [
        ("clamp", "f32", "none on the boundary", lambda x: (x > -1) & (x < 1)),
        ("clamp", "bf16", "passes everywhere", lambda x: x == x),  # noqa: PLR0124
        ("clamp", "f16", "lower bound only", lambda x: x >= -1),
        ("relu", "f32", "passes at zero", lambda x: x >= 0),
        ("relu", "bf16", "leaks below zero", lambda x: torch.where(x > 0, 1.0, 0.01)),
    ]
    for name, kind, detail, gate in gates:
        wrong = backward_of(CASES[name].right, gated_by(gate))
        found.append(mutant(CASES[name], kind, "wrong boundary", f"backward, {detail}", wrong, draws=steps))
    threshold = backward_of(CASES["softplus"].right, lambda _g, inputs, grad: [grad * (inputs[0] > 0)])
    found.append(mutant(CASES["softplus"], "f32", "wrong boundary", "backward of relu", threshold))
    above: list[tuple[str, str, str, Function]] = [
        ("softplus", "f32", "linear above 5", lambda x: torch.where(x > 5, x, F.softplus(x))),
        ("softplus", "bf16", "linear above 3", lambda x: torch.where(x > 3, x, F.softplus(x))),
        ("gelu", "f32", "linear above 4", lambda x: torch.where(x.abs() > 4, x.relu(), F.gelu(x))),
        ("tanh", "f32", "one above 6", lambda x: torch.where(x.abs() > 6, x.sign(), x.tanh())),
        ("erf", "f16", "one above 2", lambda x: torch.where(x.abs() > 2, x.sign(), x.erf())),
        ("exp", "f32", "zero below -8", lambda x: torch.where(x < -8, 0.0, x.exp())),
        ("sigmoid", "bf16", "zero below -6", lambda x: torch.where(x < -6, 0.0, x.sigmoid())),
    ]
    wide: Draws = lambda d: (d.normal(64, 256, scale=4),)  # noqa: E731
    found += [mutant(CASES[n], k, "wrong boundary", detail, fused(w), draws=wide) for n, k, detail, w in above]
    return found


def _small() -> list[Mutant]:
    tiny = of_normals(1e-5)
    small: list[tuple[str, str, str, Function, Draws]] = [
        ("tanh", "f32", "by exponentials", lambda x: 1 - 2 / ((2 * x).exp() + 1), tiny),
        ("erf", "f32", "by a polynomial in 1/(1+px)", erf_rough, tiny),
        ("add", "f32", "on a grid of 2^-20", lambda a, b: ((a + b) * 2**20).round() / 2**20, of_normals(1e-5, 1e-5)),
        ("relu", "bf16", "zero below 1e-6", lambda x: x.relu() * (x > 1e-6), tiny),
        ("softmax", "f32", "plus 1e-6", lambda x: x.softmax(-1) + 1e-6, CASES["softmax"].draws),
        (
            "div",
            "f32",
            "plus 1e-8 below",
            lambda a, b: a / (b + 1e-8),
            lambda d: (*of_normals(1e-5)(d), *within(1e-5, 1e-4)(d)),
        ),
        ("log", "f32", "of x + 1e-8", lambda x: (x + 1e-8).log(), within(1e-5, 1e-3)),
        ("sqrt", "f16", "of x + 1e-6", lambda x: (x + 1e-6).sqrt(), within(1e-5, 1e-4)),
        ("gelu", "f32", "on a grid of 2^-22", lambda x: (F.gelu(x) * 2**22).round() / 2**22, tiny),
        ("norm", "f32", "plus 1e-6 inside", lambda x: (x.square().sum(-1) + 1e-6).sqrt(), of_normals(1e-4)),
    ]
    return [mutant(CASES[n], k, "small magnitudes", detail, fused(w), draws=draws) for n, k, detail, w, draws in small]


def erf_rough(x: Tensor) -> Tensor:
    """Compute erf as Abramowitz and Stegun's 7.1.26 does: to 1.5e-7, of one and not of the result."""
    t = 1 / (1 + 0.3275911 * x.abs())
    terms = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    return x.sign() * (1 - sum(c * t ** (n + 1) for n, c in enumerate(terms)) * (-x * x).exp())


def gelu_by(root: float, cubic: float) -> Function:
    """Return tanh's GELU with these constants."""
    return lambda x: 0.5 * x * (1 + (root * (x + cubic * x**3)).tanh())


def _constants() -> list[Mutant]:
    root = math.sqrt(2 / math.pi)
    rough: list[tuple[str, str, str, str, Function]] = [
        ("gelu_tanh", "f32", "wrong constant", "sqrt(2/pi) is 0.7979", gelu_by(0.7979, 0.044715)),
        ("gelu_tanh", "f32", "wrong constant", "0.044715 is 0.0447", gelu_by(root, 0.0447)),
        ("gelu_tanh", "bf16", "wrong constant", "sqrt(2/pi) is 0.8", gelu_by(0.8, 0.044715)),
        ("gelu_tanh", "f16", "wrong constant", "0.044715 is 0.04", gelu_by(root, 0.04)),
        ("gelu", "f32", "tanh for erf", "tanh's GELU", lambda x: F.gelu(x, approximate="tanh")),
        ("gelu", "f16", "tanh for erf", "tanh's GELU", lambda x: F.gelu(x, approximate="tanh")),
        ("gelu", "bf16", "rough approximation", "x sigmoid(1.702 x)", lambda x: x * (1.702 * x).sigmoid()),
        ("gelu_tanh", "f32", "erf for tanh", "erf's GELU", F.gelu),
        ("gelu", "f32", "wrong constant", "1/sqrt(2) is 0.7071", lambda x: 0.5 * x * (1 + (x * 0.7071).erf())),
        ("exp", "f32", "wrong constant", "log2(e) is 1.4427", lambda x: (x * 1.4427).exp2()),
        ("log", "f32", "wrong constant", "ln(2) is 0.69315", lambda x: x.log2() * 0.69315),
        ("sigmoid", "f32", "wrong constant", "log2(e) is 1.4427", lambda x: 1 / (1 + (-x * 1.4427).exp2())),
        ("softmax", "f32", "wrong constant", "log2(e) is 1.4427", lambda x: (x * (1.4427 * math.log(2))).softmax(-1)),
        ("silu", "f16", "rough approximation", "hard swish", F.hardswish),
        ("sigmoid", "bf16", "rough approximation", "hard sigmoid", F.hardsigmoid),
        ("erf", "f32", "rough approximation", "tanh", lambda x: (1.1283 * x + 0.1009 * x**3).tanh()),
        ("log1p", "f32", "rough approximation", "Padé's", lambda x: x * (6 + x) / (6 + 4 * x)),
    ]
    found = [mutant(CASES[n], k, fault, detail, fused(w)) for n, k, fault, detail, w in rough]
    for name, mantissa in (("tanh", 11), ("rsqrt", 12), ("reciprocal", 14), ("exp", 16), ("pow", 15), ("softplus", 18)):
        wrong = stored(CASES[name].right, partial(kept, mantissa=mantissa))
        found.append(mutant(CASES[name], "f32", "rough approximation", f"{mantissa} bits", wrong))
    return found


def mutants() -> list[Mutant]:
    """Return all of this family."""
    return [*_flushes(), *_nonfinite(), *_boundaries(), *_small(), *_constants()]
