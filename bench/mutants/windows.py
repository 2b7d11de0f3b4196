"""Faults of products, windows and groups: operands swapped, broadcasts, borders, kernels turned."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import Mutant
from .draws import Draws
from .operators import CASES
from .wrappers import Function, backward_of, by, chosen, fused, mutant

Tensor = torch.Tensor
Row = tuple[str, str, str, str, Function, Draws | None]
SQUARE: Draws = lambda d: (d.normal(96, 96), d.normal(96, 96))  # noqa: E731
NEGATIVE: Draws = lambda d: (d.uniform(2, 8, 16, 16, low=-3, high=-0.5),)  # noqa: E731


def _bins(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, x.shape[-1] // 5)[..., :5, :5]


def _interleaved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    order = torch.arange(16).view(4, 4).T.reshape(-1)
    out = F.group_norm(x[:, order], 4, None, None, 1e-5)[:, order]
    return out * w[:, None, None] + b[:, None, None]


def _rows() -> list[Row]:
    linear: Draws = lambda d: (d.normal(64, 64), d.normal(64, 64, scale=0.1), d.normal(64, scale=0.5))  # noqa: E731
    channels: Draws = lambda d: (d.normal(2, 8, 16, 16), d.normal(16, 8, 3, 3, scale=0.1), d.normal(16, scale=0.1))  # noqa: E731
    return [
        (
            "linear",
            "bf16",
            "wrong broadcasting",
            "bias down the rows",
            lambda x, w, b: F.linear(x, w) + b[:, None],
            linear,
        ),
        ("linear", "bf16", "wrong value", "without its bias", lambda x, w, b: F.linear(x, w), linear),  # noqa: ARG005
        ("add", "f32", "wrong broadcasting", "transposed", lambda a, b: a + b.mT, SQUARE),
        ("mul", "f16", "wrong broadcasting", "row for column", lambda a, b: a * b[:, :1], SQUARE),
        ("matmul", "f32,f16", "swapped operands", "second transposed", lambda a, b: a @ b.mT, SQUARE),
        ("matmul", "bf16", "swapped operands", "b a for a b", lambda a, b: b @ a, SQUARE),
        ("bmm", "bf16", "wrong index", "another batch's factor", lambda a, b: torch.bmm(a, b.roll(1, 0)), None),
        (
            "baddbmm",
            "f32,bf16",
            "wrong constant",
            "alpha and beta swapped",
            lambda c, a, b: torch.baddbmm(c, a, b, beta=0.25, alpha=0.5),
            None,
        ),
        (
            "baddbmm",
            "f16",
            "wrong constant",
            "beta forgotten",
            lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.25),
            None,
        ),
        (
            "conv2d",
            "f16",
            "wrong value",
            "kernel turned",
            lambda x, w, b: F.conv2d(x, w.flip(2, 3), b, padding=1),
            channels,
        ),
        (
            "conv2d",
            "bf16",
            "wrong boundary",
            "border repeated",
            lambda x, w, b: F.conv2d(F.pad(x, (1,) * 4, "replicate"), w, b),
            channels,
        ),
        (
            "conv2d",
            "bf16",
            "off-by-one reduction",
            "last channel lost",
            lambda x, w, b: F.conv2d(x[:, :-1], w[:, :-1], b, padding=1),
            channels,
        ),
        (
            "conv1d",
            "f16",
            "off-by-one reduction",
            "last tap lost",
            lambda x, w: F.conv1d(x, w[..., :-1], padding=2)[..., :64],
            None,
        ),
        (
            "conv1d",
            "f32",
            "wrong boundary",
            "wraps around",
            lambda x, w: F.conv1d(F.pad(x, (2, 2), "circular"), w),
            None,
        ),
        (
            "conv_transpose2d",
            "bf16",
            "wrong value",
            "kernel turned",
            lambda x, w: CASES["conv_transpose2d"].right(x, w.flip(2, 3)),
            None,
        ),
        (
            "max_pool2d",
            "f32,f16",
            "wrong boundary",
            "pads zeros",
            lambda x: F.max_pool2d(F.pad(x, (1,) * 4), 3, 2),
            NEGATIVE,
        ),
        (
            "avg_pool2d",
            "bf16",
            "wrong boundary",
            "doesn't count the padding",
            lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            None,
        ),
        (
            "avg_pool2d",
            "f16",
            "wrong constant",
            "divides by 8",
            lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=8),
            None,
        ),
        ("adaptive_avg_pool2d", "f32,f16", "wrong boundary", "equal windows", _bins, None),
        ("adaptive_avg_pool2d", "bf16", "wrong boundary", "equal windows", _bins, None),
        (
            "interpolate",
            "f16",
            "wrong boundary",
            "corners aligned",
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
            None,
        ),
        ("interpolate", "bf16", "wrong value", "nearest", lambda x: F.interpolate(x, scale_factor=2), None),
        ("group_norm", "f32", "wrong index", "groups interleaved", _interleaved, None),
        ("prod", "f32", "wrong value", "sign lost", lambda x: x.prod(-1).abs(), lambda d: (d.normal(64, 16),)),
    ]


def _transposed(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return g @ b, a @ g


def mutants() -> list[Mutant]:
    """Return all of this family."""
    found = []
    for name, kind, fault, detail, wrong, draws in _rows():
        found += [mutant(c, k, fault, detail, fused(wrong), draws=draws) for c, k in chosen(f"{name}:{kind}")]
    untransposed = backward_of(CASES["matmul"].right, by(_transposed))
    fault = "swapped operand in backward"
    found += [mutant(c, k, fault, "not transposed", untransposed, draws=SQUARE) for c, k in chosen("matmul:f32,bf16")]
    return found
