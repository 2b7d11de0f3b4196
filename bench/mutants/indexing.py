"""Faults of where values come from: indices, duplicates, ties, masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import Mutant
from .draws import Draws
from .operators import CASES
from .wrappers import Function, backward_of, by, chosen, fused, mutant, replaced

Tensor = torch.Tensor
TIED: Draws = lambda d: (d.grid(64, 256, step=0.5, low=-6, high=6),)  # noqa: E731


def _last_argmax(x: Tensor) -> Tensor:
    return x.shape[-1] - 1 - x.flip(-1).argmax(-1)


def _tiles_sorted(x: Tensor) -> Tensor:
    return torch.cat([piece.sort(-1).values for piece in x.split(256, -1)], -1)


def _lost_carry(x: Tensor) -> Tensor:
    out = torch.cat([piece.cumsum(-1) for piece in x.split(256, -1)], -1)
    out[..., 256:512] += out[..., 255:256]
    out[..., 512:768] += out[..., 511:512]
    out[..., 768:] += out[..., 511:512]
    return out


def _overwriting(x: Tensor, source: Tensor, index: Tensor) -> Tensor:
    at = index if index.ndim == 2 else index[:, None].expand_as(source)
    return x + torch.zeros_like(x).scatter(0, at, source)


Row = tuple[str, str, str, str, Function, Draws | None]


def _rows() -> list[Row]:
    wide: Draws = lambda d: (d.grid(64, 64, step=1e-3, low=0, high=900),)  # noqa: E731
    return [
        ("argmax", "f32", "wrong boundary", "the last of ties", _last_argmax, TIED),
        ("argmax", "bf16", "wrong boundary", "the last of ties", _last_argmax, TIED),
        ("argmax", "f32", "large indices", "the first 256 only", lambda x: x[..., :256].argmax(-1), None),
        (
            "argmax",
            "f32",
            "reduced-precision factors",
            "compared in bf16",
            lambda x: x.to(torch.bfloat16).argmax(-1),
            wide,
        ),
        ("argmax", "f16", "wrong index", "one too many", lambda x: (x.argmax(-1) + 1) % x.shape[-1], None),
        (
            "amax",
            "f16",
            "wrong constant",
            "begins with zero",
            lambda x: x.amax(-1).clamp(min=0),
            lambda d: (d.normal(64, 8, shift=-1),),
        ),
        ("amax", "bf16", "wrong value", "of magnitudes", lambda x: x.abs().amax(-1), lambda d: (d.normal(64, 32),)),
        ("topk", "bf16", "wrong order", "not sorted", lambda x: x.topk(8, -1).values.roll(1, -1), None),
        ("topk", "bf16", "large indices", "of the first 512", lambda x: x[..., :512].topk(8, -1).values, None),
        ("sort", "f32", "large indices", "each 256 by themselves", _tiles_sorted, None),
        (
            "sort",
            "f16",
            "wrong order",
            "two neighbours swapped",
            lambda x: x.sort(-1).values.index_select(-1, _swap(x)),
            None,
        ),
        ("cumsum", "f32", "lost carry", "of one block", _lost_carry, None),
        ("cumsum", "bf16", "lost carry", "of one block", _lost_carry, None),
        (
            "index_select",
            "f32,f16",
            "wrong index",
            "the next one",
            lambda x, i: x.index_select(0, (i + 1) % len(x)),
            None,
        ),
        (
            "index_select",
            "bf16",
            "wrong index",
            "the last one clamped",
            lambda x, i: x.index_select(0, i.clamp(max=len(x) - 2)),
            None,
        ),
        ("gather", "bf16", "wrong index", "by another row's", lambda x, i: x.gather(1, i.roll(1, 0)), None),
        (
            "gather",
            "f32,bf16",
            "wrong index",
            "the last one clamped",
            lambda x, i: x.gather(1, i.clamp(max=x.shape[1] - 2)),
            None,
        ),
        (
            "embedding",
            "f16",
            "wrong index",
            "row 0 as padding",
            lambda w, i: F.embedding(i, w) * (i != 0)[..., None],
            None,
        ),
        ("embedding", "f16", "large indices", "modulo 2^8", lambda w, i: F.embedding(i % 256, w), None),
        ("scatter_add", "bf16", "duplicates overwrite", "in the result", _overwriting, None),
        ("index_add", "f32", "duplicates overwrite", "in the result", _overwriting, None),
        (
            "index_add",
            "f32,f16",
            "off-by-one reduction",
            "without the last",
            lambda x, s, i: x.index_add(0, i[:-1], s[:-1]),
            None,
        ),
        (
            "scatter_add",
            "f16",
            "stale accumulator",
            "begins with zero",
            lambda x, s, i: torch.zeros_like(x).scatter_add(0, i, s),
            None,
        ),
        (
            "roll",
            "bf16",
            "wrong boundary",
            "zeros come in",
            lambda x: x.roll(5, -1) * (torch.arange(x.shape[-1]) >= 5),
            None,
        ),
        ("roll", "bf16", "wrong index", "by one more", lambda x: x.roll(6, -1), None),
        (
            "cat",
            "bf16",
            "wrong index",
            "begins one early",
            lambda a, b: torch.cat((a[..., :-1], b, a[..., -1:]), -1),
            None,
        ),
        (
            "where",
            "f32,bf16",
            "wrong value",
            "the other of the last row",
            lambda c, a, b: torch.where(_last_row(c) ^ c, a, b),
            None,
        ),
        (
            "masked_fill",
            "f16",
            "wrong broadcasting",
            "the mask transposed",
            lambda x, m: x.masked_fill(m.mT, -1e3),
            None,
        ),
        (
            "masked_fill",
            "bf16",
            "lost mask",
            "of the last row",
            lambda x, m: x.masked_fill(m & ~_last_row(m), -1e3),
            None,
        ),
        ("masked_fill", "f32", "wrong constant", "-999", lambda x, m: x.masked_fill(m, -999), None),
        (
            "cross_entropy",
            "bf16",
            "wrong index",
            "the last class clamped",
            lambda x, y: F.cross_entropy(x, y.clamp(max=400)),
            None,
        ),
        ("nll_loss", "bf16", "wrong index", "the next class", lambda x, y: F.nll_loss(x, (y + 1) % x.shape[1]), None),
        ("clamp", "f32", "wrong constant", "0.9999", lambda x: x.clamp(-0.9999, 0.9999), None),
    ]


def _swap(x: Tensor) -> Tensor:
    order = torch.arange(x.shape[-1])
    order[[100, 101]] = order[[101, 100]]
    return order


def _last_row(mask: Tensor) -> Tensor:
    out = torch.zeros_like(mask)
    out[-1] = True
    return out


def _all_ties(grad: Tensor, x: Tensor) -> tuple[Tensor]:
    return (grad[:, None] * (x == x.amax(-1, keepdim=True)),)


def mutants() -> list[Mutant]:
    """Return all of this family."""
    found = []
    for name, kind, fault, detail, wrong, draws in _rows():
        found += [mutant(c, k, fault, detail, fused(wrong), draws=draws) for c, k in chosen(f"{name}:{kind}")]
    ties = backward_of(CASES["amax"].right, by(_all_ties))
    found.append(mutant(CASES["amax"], "f32", "wrong boundary", "backward, all ties in full", ties, draws=TIED))

    first = replaced(CASES["where"].right, lambda c, a, b: c * a + ~c * b)
    infinite: Draws = lambda d: (d.mask(64, 256), d.normal(64, 256), d.planted(float("inf"), 64, 256))  # noqa: E731
    found.append(mutant(CASES["where"], "f32", "NaN handling", "by products", first, draws=infinite))
    return found
