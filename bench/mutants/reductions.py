"""Faults of sums: an element too few, sums in few bits, factors in few bits. Each reduction is written once, by its sum."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from . import Mutant
from .draws import Draws
from .numerics import bf16, bf16_twice, fp16, tf32, towards_zero
from .operators import EPS
from .wrappers import Function, backward_through, chosen, fused, mutant, replaced, taken

Tensor = torch.Tensor
Total = Callable[[Tensor, int], Tensor]  # a sum over one dimension, which it drops


def in_few_bits(dtype: torch.dtype) -> Total:
    """Return a sum, term by term, each partial sum rounded to a dtype."""

    def total(x: Tensor, dim: int) -> Tensor:
        held = torch.zeros_like(x.select(dim, 0), dtype=dtype)
        for piece in x.unbind(dim):
            held = (held.float() + piece.float()).to(dtype)
        return held.to(x.dtype)

    return total


def truncating(x: Tensor, dim: int) -> Tensor:
    """Sum term by term, each partial sum rounded towards zero to float32."""
    held = torch.zeros_like(x.select(dim, 0), dtype=torch.float32)
    for piece in x.unbind(dim):
        held = towards_zero(held.double() + piece.double(), torch.float32)
    return held


def leaving_out(what: str) -> Total:
    """Return a sum without the first or the last term."""
    first = int(what == "first")
    return lambda x, dim: x.narrow(dim, first, x.shape[dim] - 1).sum(dim)


def _mean(total: Total, x: Tensor, dim: int = -1) -> Tensor:
    return total(x, dim).unsqueeze(dim) / x.shape[dim]


def _variance(total: Total, x: Tensor, dim: int = -1) -> Tensor:
    return total((x - _mean(total, x, dim)).square(), dim).unsqueeze(dim) / x.shape[dim]


def _normalised(total: Total, x: Tensor) -> Tensor:
    return (x - _mean(total, x)) * (_variance(total, x) + EPS).rsqrt()


def _std(total: Total, x: Tensor) -> Tensor:
    return (_variance(total, x).squeeze(-1) * (x.shape[-1] / (x.shape[-1] - 1))).sqrt()


def _group(total: Total, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    held = _normalised(total, x.reshape(x.shape[0], 4, -1)).view(x.shape)
    return held * w[:, None, None] + b[:, None, None]


def _batch(total: Total, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    rows = x.transpose(0, 1)
    held = _normalised(total, rows.reshape(x.shape[1], -1)).view(rows.shape).transpose(0, 1)
    return held * w[:, None, None] + b[:, None, None]


def _softmax(total: Total, x: Tensor) -> Tensor:
    raised = (x - x.amax(-1, keepdim=True)).exp()
    return raised / total(raised, -1).unsqueeze(-1)


def _logsumexp(total: Total, x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return top.squeeze(-1) + total((x - top).exp(), -1).log()


def _entropy(total: Total, x: Tensor, y: Tensor) -> Tensor:
    return (_logsumexp(total, x) - x.gather(1, y[:, None])[:, 0]).mean()


def _attend(total: Total, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _softmax(total, q @ k.mT / q.shape[-1] ** 0.5) @ v


def _cosine(total: Total, a: Tensor, b: Tensor) -> Tensor:
    return total(a * b, -1) / (total(a * a, -1) * total(b * b, -1)).sqrt()


def _bce(total: Total, x: Tensor, y: Tensor) -> Tensor:
    return total((x.relu() - x * y + (-x.abs()).exp().log1p()).view(-1), 0) / x.numel()


def _columns(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    held = F.unfold(x, w.shape[2:], padding=1).transpose(1, 2)
    return held, w.flatten(1)


def _product(total: Total, a: Tensor, b: Tensor) -> Tensor:
    return total(a.unsqueeze(-1) * b.unsqueeze(-3), -2)


def _conv(total: Total, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    held, flat = _columns(x, w)
    out = torch.stack([total(piece[:, :, None] * flat.T, 1) for piece in held])
    return out.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:]) + b[:, None, None]


BY: dict[str, Callable[..., Tensor]] = {
    "sum": lambda total, x: total(x, -1),
    "mean": lambda total, x: _mean(total, x).squeeze(-1),
    "var": lambda total, x: _variance(total, x).squeeze(-1) * (x.shape[-1] / (x.shape[-1] - 1)),
    "std": _std,
    "norm": lambda total, x: total(x * x, -1).sqrt(),
    "softmax": _softmax,
    "logsumexp": _logsumexp,
    "log_softmax": lambda total, x: x - _logsumexp(total, x).unsqueeze(-1),
    "cross_entropy": _entropy,
    "mse_loss": lambda total, a, b: total((a - b).square().view(-1), 0) / a.numel(),
    "bce": _bce,
    "layer_norm": lambda total, x, w, b: _normalised(total, x) * w + b,
    "rms_norm": lambda total, x, w: x * (_mean(total, x * x) + 1e-6).rsqrt() * w,
    "group_norm": _group,
    "batch_norm": _batch,
    "cosine_similarity": _cosine,
    "sdpa": _attend,
    "matmul": _product,
    "bmm": _product,
    "linear": lambda total, x, w, b: _product(total, x, w.T) + b,
    "conv2d": _conv,
    "prod": lambda total, x: total(x.log(), -1).exp(),
}

ABOVE: dict[str, Draws] = {
    "matmul": lambda d: (d.uniform(32, 512), d.uniform(512, 24)),
    "conv2d": lambda d: (d.uniform(2, 8, 8, 8), d.uniform(8, 8, 3, 3), d.normal(8, scale=0.1)),
}


def _by_sum(name: str, total: Total) -> Function:
    return functools.partial(BY[name], total)


PRODUCTS: dict[str, Draws] = {
    "matmul": lambda d: (d.normal(32, 256), d.normal(256, 24, scale=0.06)),
    "bmm": lambda d: (d.normal(4, 16, 96), d.normal(4, 96, 16)),
    "linear": lambda d: (d.normal(24, 256), d.normal(32, 256, scale=0.06), d.normal(32, scale=0.1)),
    "conv2d": lambda d: (d.normal(2, 4, 8, 8), d.normal(8, 4, 3, 3, scale=0.2), d.normal(8, scale=0.1)),
    "mse_loss": lambda d: (d.normal(32, 64), d.normal(32, 64)),
    "bce": lambda d: (d.normal(32, 64, scale=3), d.uniform(32, 64, grad=False)),
}


def scan(dtype: torch.dtype) -> Function:
    """Return a running sum that is rounded to a dtype at each step."""

    def wrong(x: Tensor) -> Tensor:
        held, out = torch.zeros_like(x[..., 0], dtype=dtype), []
        for piece in x.unbind(-1):
            held = (held.float() + piece.float()).to(dtype)
            out.append(held.to(x.dtype))
        return torch.stack(out, -1)

    return wrong


def _left_out() -> list[Mutant]:
    found = []
    spec = {
        "last": "sum:bf16 mean var:bf16 softmax logsumexp:bf16 cross_entropy layer_norm rms_norm:f16 matmul linear:bf16 "
        "sdpa cosine_similarity batch_norm conv2d",
        "first": "sum std norm log_softmax:f16 mse_loss group_norm:bf16 bmm softmax:bf16 bce",
    }
    for what, words in spec.items():
        for c, k in chosen(words):
            wrong = fused(_by_sum(c.name, leaving_out(what)))
            found.append(mutant(c, k, "off-by-one reduction", f"without the {what}", wrong, draws=PRODUCTS.get(c.name)))
    counts: list[tuple[str, Function]] = [
        ("mean:f32,f16", lambda x: x.sum(-1) / (x.shape[-1] - 1)),
        ("var:f32", lambda x: x.var(-1, correction=0)),
        ("std:f32", lambda x: x.std(-1, correction=0)),
        ("layer_norm:f32", lambda x, w, b: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + EPS).sqrt() * w + b),
        ("mse_loss:f32", lambda a, b: (a - b).square().sum() / (a.numel() - 1)),
        ("cross_entropy:f16", lambda x, y: F.cross_entropy(x, y, reduction="sum") / (len(x) - 1)),
        ("rms_norm:f32", lambda x, w: x * (x.square().sum(-1, keepdim=True) / (x.shape[-1] + 1) + 1e-6).rsqrt() * w),
        ("nll_loss:f32", lambda x, y: F.nll_loss(x, y, reduction="sum") / (len(x) - 1)),
    ]
    for word, function in counts:
        for c, k in chosen(word):
            found.append(mutant(c, k, "off-by-one reduction", "counts one off", fused(function)))
    others: list[tuple[str, Function]] = [
        ("amax:f32", lambda x: x[..., :-1].amax(-1)),
        ("argmax:f32", lambda x: x[..., 1:].argmax(-1)),
        ("prod:bf16", lambda x: x[..., 1:].prod(-1)),
        ("cumsum:f32", lambda x: x.cumsum(-1) - x),
        ("topk:f32", lambda x: x.topk(9, -1).values[..., 1:]),
    ]
    for word, function in others:
        for c, k in chosen(word):
            draws: Draws = lambda d: (d.grid(256, 32, step=0.125, low=-40, high=40),)  # noqa: E731
            found.append(
                mutant(
                    c, k, "off-by-one reduction", "one left out", function, draws=None if c.name == "prod" else draws
                )
            )
    return found


def _few_bits() -> list[Mutant]:
    spec = {
        (
            "bf16 accumulation",
            torch.bfloat16,
        ): "sum sum:bf16 mean:bf16 var:bf16 norm softmax softmax:bf16 logsumexp:bf16 "
        "cross_entropy layer_norm:bf16 rms_norm:bf16 rms_norm group_norm batch_norm:bf16 mse_loss:bf16 matmul matmul:bf16 "
        "linear:bf16 bmm:bf16 sdpa:bf16 cosine_similarity:bf16 conv2d:bf16",
        (
            "fp16 accumulation",
            torch.float16,
        ): "sum:f16 mean:f16 std:f16 matmul:f16 linear:f16 conv2d softmax:f16 layer_norm "
        "log_softmax:f16 mse_loss:f16 bmm:f16 bce:f16 norm:f16",
    }
    found = []
    for (fault, dtype), words in spec.items():
        for c, k in chosen(words):
            wrong = replaced(c.right, fused(_by_sum(c.name, in_few_bits(dtype))))
            found.append(mutant(c, k, fault, fault.replace(" ", "-"), wrong, draws=PRODUCTS.get(c.name)))
        kind = "bf16" if dtype == torch.bfloat16 else "f16"
        for c, k in chosen(f"cumsum:{kind} cumsum"):
            found.append(mutant(c, k, fault, fault.replace(" ", "-"), replaced(c.right, fused(scan(dtype)))))
    above: Draws = lambda d: (d.uniform(16, 2048),)  # noqa: E731
    for c, k in chosen("sum mean cumsum norm"):
        right = scan_truncating if c.name == "cumsum" else _by_sum(c.name, truncating)
        found.append(mutant(c, k, "rounding mode", "partial sums cut", replaced(c.right, right), draws=above))
    for c, k in chosen("matmul conv2d"):
        wrong = replaced(c.right, _by_sum(c.name, truncating))
        found.append(mutant(c, k, "rounding mode", "partial sums cut", wrong, draws=ABOVE[c.name]))
    cut = fused(_by_sum("prod", lambda x, dim: bf16(x).sum(dim)))
    found += [
        mutant(c, k, "reduced-precision factors", "by logarithms in bf16", replaced(c.right, cut))
        for c, k in chosen("prod")
    ]
    return found


def scan_truncating(x: Tensor) -> Tensor:
    """Run a sum, each step rounded towards zero to float32."""
    held, out = torch.zeros_like(x[..., 0]), []
    for piece in x.unbind(-1):
        held = towards_zero(held.double() + piece.double(), torch.float32)
        out.append(held)
    return torch.stack(out, -1)


def _factors() -> list[Mutant]:
    kinds = {"tf32": tf32, "bf16": bf16, "fp16": fp16, "two bf16": bf16_twice}
    both = {
        "tf32": "matmul linear bmm baddbmm conv1d conv2d conv_transpose2d sdpa swiglu block",
        "bf16": "matmul bmm conv2d sdpa_causal mlp cosine_similarity",
        "fp16": "linear conv_transpose2d sdpa_gqa",
        "two bf16": "matmul conv1d linear",
    }
    found = []
    fault = "reduced-precision factors"
    for kind, words in both.items():
        found += [mutant(c, k, fault, f"factors in {kind}", taken(c.right, kinds[kind])) for c, k in chosen(words)]
    one = {"tf32": "matmul conv2d mlp", "bf16": "linear baddbmm"}
    for kind, words in one.items():
        found += [
            mutant(c, k, fault, f"second factor in {kind}", taken(c.right, kinds[kind], (1,))) for c, k in chosen(words)
        ]
    behind = {"tf32": "matmul linear conv2d sdpa bmm", "bf16": "linear block conv1d", "two bf16": "matmul"}
    for kind, words in behind.items():
        for c, k in chosen(words):
            wrong = backward_through(c.right, taken(c.right, kinds[kind]))
            found.append(mutant(c, k, fault, f"backward, factors in {kind}", wrong))
    return found


def mutants() -> list[Mutant]:
    """Return all of this family."""
    return [*_left_out(), *_few_bits(), *_factors()]
