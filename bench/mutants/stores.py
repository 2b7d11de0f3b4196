"""Faults of where results go: roundings of the last store, tiles, rows and elements, stale memory, sizes and strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch

from . import Mutant
from .draws import Draws
from .numerics import bf16, flipped, fp16, kept, towards_zero, upwards
from .wrappers import Function, chosen, mutant, replaced, rounded, stored

Tensor = torch.Tensor


def tile(how: str, size: int, dim: int = -1) -> Callable[[Tensor], Tensor]:
    """Spoil the last tile of a dimension: left zero, as the row before has it (stale), or as the tile before (copied)."""

    def spoiled(out: Tensor) -> Tensor:
        size_here = min(size, out.shape[dim] // 2)
        out = out.clone()
        last = out.narrow(dim, out.shape[dim] - size_here, size_here)
        if how == "zero":
            last.zero_()
        elif how == "stale":
            last.copy_(last.roll(1, 0))
        else:
            last.copy_(out.narrow(dim, out.shape[dim] - 2 * size_here, size_here).clone())
        return out

    return spoiled


def element(change: Callable[[Tensor], Tensor], place: float) -> Callable[[Tensor], Tensor]:
    """Change the element whose magnitude has this rank, from 0 (the smallest) to 1."""

    def spoiled(out: Tensor) -> Tensor:
        out = out.contiguous().clone()
        flat = out.view(-1)
        order = flat.abs().argsort()
        at = order[int(place * (len(order) - 1))]
        flat[at] = change(flat[at])
        return out

    return spoiled


def line(dim: int, factor: float) -> Callable[[Tensor], Tensor]:
    """Scale one row or one column."""

    def spoiled(out: Tensor) -> Tensor:
        out = out.clone()
        out.select(dim, out.shape[dim] * 2 // 3).mul_(factor)
        return out

    return spoiled


def wrapped(size: int) -> Callable[[Tensor], Tensor]:
    """Address elements modulo a size that is a power of two, as too narrow an index does."""
    return lambda out: out.reshape(-1)[torch.arange(out.numel()) % size].view(out.shape)


def beyond(size: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Change what stands beyond an index of the last dimension."""
    return lambda out: torch.cat((out[..., :size], change(out[..., size:])), -1)


def when_odd(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Change the result of odd sizes only."""
    return lambda out: change(out) if out.shape[-1] % 2 else out


def in_memory_order(right: Function, which: int = 0) -> Function:
    """Take one input as if it were contiguous."""

    def ahead(*inputs: Tensor) -> Tensor:
        held = list(inputs)
        x, strides = held[which], torch.empty(held[which].shape, device="meta").stride()
        held[which] = x.as_strided(x.shape, strides)
        return right(*held)

    return replaced(right, ahead)


def on_top(right: Function, share: float = 1.0, reach: int | None = None) -> Function:
    """Add to what the memory holds, which is the result of other inputs: of all elements, or of the first few."""

    def ahead(*inputs: Tensor) -> Tensor:
        before = right(*(x.roll(1, 0) if x.is_floating_point() else x for x in inputs)) * share
        if reach is not None and before.ndim:
            before.view(-1)[reach:] = 0
        return right(*inputs) + before

    return replaced(right, ahead)


def odd_sizes(*shapes: tuple[int, ...]) -> Draws:
    """Return draws of these shapes."""
    return lambda d: tuple(d.normal(*shape) for shape in shapes)


TRANSPOSED: dict[str, Draws] = {
    "add": lambda d: (d.transposed(96, 96), d.normal(96, 96)),
    "exp": lambda d: (d.transposed(64, 64),),
    "gelu": lambda d: (d.transposed(64, 64),),
    "softmax": lambda d: (d.transposed(64, 64),),
    "sum": lambda d: (d.transposed(64, 64),),
    "cumsum": lambda d: (d.transposed(64, 64),),
    "matmul": lambda d: (d.transposed(96, 96), d.normal(96, 96)),
    "layer_norm": lambda d: (d.transposed(64, 64), d.normal(64, shift=1), d.normal(64)),
    "sdpa": lambda d: (d.transposed(2, 4, 32, 32), d.normal(2, 4, 32, 32), d.normal(2, 4, 32, 32)),
}


def _roundings() -> list[Mutant]:
    halves = (
        "add:bf16 mul:bf16,f16 exp:f16 sigmoid:bf16 gelu:bf16,f16 softmax:bf16,f16 layer_norm:bf16 matmul:bf16 linear:f16 "
        "sum:bf16 mean:f16 tanh:bf16 silu:bf16 bmm:f16 conv1d:bf16 sdpa:bf16 avg_pool2d:bf16 cumsum:f16"
    )
    cut = [(c, k, "towards zero") for c, k in chosen(halves)]
    cut += [(c, k, "towards zero") for c, k in chosen("add mul div sqrt")]
    up = (
        "div:bf16 rms_norm:bf16 conv2d:f16 sqrt:bf16 log:f16 mean:bf16 baddbmm:bf16 interpolate:bf16 add mul reciprocal"
    )
    cut += [(c, k, "up") for c, k in chosen(up)]
    how = {"towards zero": towards_zero, "up": upwards}
    found = [mutant(c, k, "rounding mode", f"stored {to}", rounded(c.right, how[to])) for c, k, to in cut]
    through = {"bf16": bf16, "fp16": fp16, "20 bits": lambda x: kept(x, 19), "22 bits": lambda x: kept(x, 21)}
    words = {
        "bf16": "softmax layer_norm mean exp add embedding gather:f16 silu:f16 bmm:f16 where sort interpolate rotary prod",
        "fp16": "log rms_norm avg_pool2d cat logsumexp sdpa",
        "20 bits": "tanh group_norm sqrt cat",
        "22 bits": "mul sqrt add clamp",
    }
    for kind, spec in words.items():
        fault = "double rounding" if kind.endswith("16") else "reduced-precision store"
        found += [mutant(c, k, fault, f"through {kind}", stored(c.right, through[kind])) for c, k in chosen(spec)]
    large: Draws = lambda d: (d.normal(64, 256, scale=4e4), d.normal(64, 256, scale=4e4))  # noqa: E731
    found += [
        mutant(c, k, "double rounding", "through fp16, overflowing", stored(c.right, fp16), draws=large)
        for c, k in chosen("add:bf16")
    ]
    return found


def _places() -> list[Mutant]:
    tiles = {
        ("zero", 8): "linear:bf16 softmax sdpa:f16 interpolate:f16",
        ("zero", 16): "bmm:f32,bf16 cumsum:bf16 embedding",
        ("zero", 32): "gelu:bf16 conv1d:bf16 layer_norm:f16",
        ("stale", 8): "conv2d rms_norm:bf16 max_pool2d:f16 add:f16",
        ("stale", 16): "layer_norm:f32,bf16 gather swiglu:bf16",
        ("stale", 32): "matmul:bf16 log_softmax silu:f16 dropout:bf16",
        ("copied", 8): "sdpa:f32,bf16 baddbmm:bf16 conv_transpose2d",
        ("copied", 16): "sort:bf16 cat:bf16 index_select:bf16",
        ("copied", 32): "matmul roll:f16 exp:bf16 mlp:f32,bf16",
    }
    found = []
    for (how, size), spec in tiles.items():
        fault = "dropped last tile" if how == "zero" else "stale last tile"
        found += [mutant(c, k, fault, f"last {size} {how}", stored(c.right, tile(how, size))) for c, k in chosen(spec)]
    rows = {
        "last row zero": (tile("zero", 1, 0), "matmul index_add:bf16 group_norm:bf16"),
        "a row by 1 percent": (
            line(0, 1.01),
            "matmul layer_norm:f16 softmax:f16 sum embedding:bf16 scatter_add",
        ),
        "a column by 1 percent": (
            line(-1, 1.01),
            "linear:bf16 bmm:bf16 conv2d sdpa:f16 softmax:f16 cumsum:f32,bf16 rms_norm",
        ),
        "a row by 1e-4": (line(0, 1.0001), "matmul batch_norm log_softmax sdpa_causal"),
        "a row by 1e-5": (line(0, 1.00001), "mul linear rotary"),
    }
    for detail, (change, spec) in rows.items():
        found += [mutant(c, k, "one row or column", detail, stored(c.right, change)) for c, k in chosen(spec)]
    single: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
        "the median x4": (
            element(lambda x: x * 4, 0.5),
            "add matmul:bf16 softmax:f16 sdpa:f32,bf16 index_add interpolate:f16",
        ),
        "a small one x4": (element(lambda x: x * 4, 0.02), "linear:bf16 bmm:bf16 mul:bf16 conv2d layer_norm:f16"),
        "the largest negated": (element(torch.neg, 1), "tanh:f32,bf16 matmul cumsum:bf16 conv_transpose2d:bf16 erf"),
        "a small one negated": (element(torch.neg, 0.02), "linear:f16 rms_norm:f16 log:f32,bf16 sdpa_gqa gather:bf16"),
        "one an ulp times 8": (
            element(lambda x: x * (1 + 8 * torch.finfo(x.dtype).eps), 0.6),
            "mul:bf16 div sqrt:f16 max_pool2d:f32,bf16",
        ),
    }
    for detail, (change, spec) in single.items():
        found += [mutant(c, k, "one element", detail, stored(c.right, change)) for c, k in chosen(spec)]
    struck = {
        20: "matmul sigmoid sum",
        22: "softmax group_norm",
        23: "add bmm",
        26: "linear std",
        28: "mean",
        30: "conv1d swiglu",
    }
    for bit, spec in struck.items():
        detail = f"bit {bit} flipped"
        found += [
            mutant(c, k, "one element", detail, stored(c.right, partial(flipped, element=7, bit=bit)))
            for c, k in chosen(spec)
        ]
    return found


def _memory() -> list[Mutant]:
    found = [
        mutant(c, k, "stale accumulator", "adds to the last result", on_top(c.right))
        for c, k in chosen("matmul sum scatter_add:bf16 conv2d mean:f16 linear:bf16 sdpa")
    ]
    found += [
        mutant(c, k, "stale accumulator", "4 elements added to the last", on_top(c.right, reach=4))
        for c, k in chosen("bmm index_add norm:bf16 matmul avg_pool2d")
    ]
    found += [
        mutant(c, k, "stale accumulator", "a thousandth of the last", on_top(c.right, share=1e-3))
        for c, k in chosen("conv1d baddbmm logsumexp")
    ]
    found += [
        mutant(
            c,
            k,
            "non-contiguous strides",
            "read in the memory's order",
            in_memory_order(c.right),
            draws=TRANSPOSED[c.name],
        )
        for c, k in chosen("add exp gelu:bf16 softmax sum cumsum:f16 matmul:bf16 layer_norm sdpa")
    ]
    odd = when_odd(tile("zero", 1))
    shapes = {
        "add": ((64, 255), (64, 255)),
        "softmax": ((64, 201),),
        "bmm": ((4, 32, 64), (4, 64, 33)),
        "tanh": ((16, 77),),
    }
    shapes |= {"max_pool2d": ((2, 4, 17, 17),), "interpolate": ((2, 4, 9, 9),), "cumsum": ((16, 333),)}
    for c, k in chosen("add:bf16 softmax bmm tanh:f16 max_pool2d cumsum:bf16"):
        wrong = stored(c.right, odd)
        found.append(mutant(c, k, "odd sizes", "last of odd sizes", wrong, draws=odd_sizes(*shapes[c.name])))
    double = beyond(256, lambda x: x * 1.01)
    found += [
        mutant(c, k, "large indices", "beyond 2^8 by 1 percent", stored(c.right, double))
        for c, k in chosen("matmul linear:bf16 sort cumsum")
    ]
    found += [
        mutant(c, k, "large indices", f"modulo 2^{power}", stored(c.right, wrapped(1 << power)))
        for c, k, power in [(*pair, 10) for pair in chosen("sdpa softmax:bf16 conv2d gather")]
        + [(*pair, 14) for pair in chosen("matmul:bf16 index_select")]
        + [(*pair, 12) for pair in chosen("relu clamp:f16 embedding")]
    ]
    return found


def racing(right: Function, which: int = 0) -> Function:
    """Lose one element's contribution, another one at each call."""
    calls = itertools.count(1)

    def ahead(*inputs: Tensor) -> Tensor:
        held = list(inputs)
        held[which] = held[which].clone()
        held[which].view(-1)[next(calls) * 7919 % held[which].numel()] = 0
        return right(*held)

    return replaced(right, ahead)


def mutants() -> list[Mutant]:
    """Return all of this family."""
    raced = chosen("sum mean:f16 scatter_add index_add:bf16 matmul bmm:f16 var batch_norm")
    races = [
        mutant(c, k, "race", "loses another element each call", racing(c.right, int("_add" in c.name)))
        for c, k in raced
    ]
    return [*_roundings(), *_places(), *_memory(), *races]
