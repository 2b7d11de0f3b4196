"""The full statistics of one tensor: counts, extremes, mean, norm; in float64, or exact for integers."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.errors import UsageError
from bitwitness.stats.digest import bit_hash
from bitwitness.stats.local import as_reals, local_values

_CPU_BLOCK = 1 << 17  # elements: a megabyte of float64, which stays in the cache
_DEVICE_BLOCK = 1 << 25  # the same on an accelerator: 256 MiB of float64, and few launches even for large tensors
_INTEGERS = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
_FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
_SIGN = torch.iinfo(torch.int64).min
_LOW_HALF = 0xFFFFFFFF  # halves of words are added up: 2^31 of them fit an int64


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a tensor's values; ``min`` to ``l2`` are over the finite ones only.

    Attributes
    ----------
    count
        Number of values, the non-finite included. A complex number counts as two: its real and its imaginary
        part.
    nan, pos_inf, neg_inf, zeros
        How many are NaN, +Inf, -Inf, zero (of either sign).
    min, max, absmax
        Extremes: exact ints for integer and bool tensors. NaN if no value is finite.
    mean
        float64; of integers the correctly rounded exact mean. NaN if no value is finite.
    l2
        Square root of the sum of squares, float64; 0 if no value is finite.
    hash
        `bit_hash` of the tensor, if it was asked for.

    """

    count: int
    nan: int
    pos_inf: int
    neg_inf: int
    zeros: int
    min: float
    max: float
    mean: float
    absmax: float
    l2: float
    hash: int | None = None


@torch.no_grad()
def stats_of(tensor: Tensor, *, with_hash: bool = False) -> Stats:
    """Compute the statistics of a tensor on its device, with one transfer to the host.

    Parameters
    ----------
    tensor
        Any floating, complex or integer dtype that holds a whole number of bits in each element. Of a DTensor
        the local shard is read, of a sparse tensor the values as stored.
    with_hash
        Whether to hash the bits, too.

    Raises
    ------
    UsageError
        For a meta or quantized tensor, or a dtype that packs several numbers into an element.

    """
    values = _flat_reals(tensor)
    if values.dtype in _FLOATS:
        results = _measure_floats(values)
    elif values.dtype in _INTEGERS:
        results = _measure_integers(values)
    else:
        raise UsageError(
            f"no statistics of {values.dtype}: torch cannot read its numbers one by one; "
            "unpack or cast the tensor first, or take its bit_hash"
        )
    if with_hash:
        results = torch.cat([results, bit_hash(tensor).view(1)])
    numbers: list[int] = results.tolist()  # the one transfer
    digest = numbers.pop() if with_hash else None
    if values.dtype in _FLOATS:
        return _float_stats(values.numel(), numbers, digest)
    return _integer_stats(values.numel(), numbers, digest, _offset(values.dtype))


@torch.no_grad()
def exact_l2(tensor: Tensor) -> Tensor:
    """Return the L2 norm of a floating tensor's values, accumulated in float64: 0-d float64 on its device.

    For gradients whose float32 norm overflowed. NaN or Inf if a value is. Raises `UsageError` for a meta or
    quantized tensor.
    """
    values = _flat_reals(tensor)
    scale = _scale(values)
    norms = [torch.linalg.vector_norm(block.to(torch.float64).div(scale)) for block in _blocks(values)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm.mul_(scale)


def _flat_reals(tensor: Tensor) -> Tensor:
    return as_reals(local_values(tensor)).reshape(-1)


def _blocks(values: Tensor) -> tuple[Tensor, ...]:
    """Split, so that float64 copies stay small; an empty tensor is one empty block."""
    return torch.split(values, _CPU_BLOCK if values.device.type == "cpu" else _DEVICE_BLOCK)


def _scale(values: Tensor) -> Tensor:
    """Return what to divide by so that squares fit float64, 0-d: 1, unless the values are float64."""
    scale = torch.ones((), dtype=torch.float64, device=values.device)
    if values.dtype != torch.float64 or values.numel() == 0:
        return scale
    largest = torch.stack([block.abs().nan_to_num_(0, 0, 0).amax() for block in _blocks(values)]).amax()
    return torch.where(largest > 0, largest, scale)


def _measure_floats(values: Tensor) -> Tensor:
    """Measure a flat floating tensor: bits of float64 numbers, int64, as `_float_stats` reads them."""
    scale = _scale(values)
    # On a CPU it costs nothing to look, and a tensor without NaN and Inf can be measured five times as fast.
    clean = values.device.type == "cpu" and values.numel() > 0 and _all_finite(values)
    measure = _clean_block if clean else _block
    table = torch.stack([measure(block.to(torch.float64), scale) for block in _blocks(values)])
    counts, sums = table[:, :4].sum(0), table[:, 6:].sum(0)
    low, high = table[:, 4].amin(), table[:, 5].amax()
    return torch.cat([counts, torch.stack([low, high]), sums, scale.view(1)]).view(torch.int64)


def _all_finite(values: Tensor) -> bool:
    if values.dtype.itemsize == 1:
        values = values.to(torch.float32)
    low, high = values.aminmax()
    return bool(low.isfinite() & high.isfinite())


def _block(x: Tensor, scale: Tensor) -> Tensor:
    """Measure a block of float64: NaN, +Inf, -Inf, zeros, lowest, highest, scaled sum, sum of squares."""
    finite = x.isfinite()
    scaled = x.where(finite, 0.0).div_(scale)
    nothing = x.new_full((1,), torch.inf)  # the extremes of no values at all
    return torch.stack(
        [
            *(found.sum(dtype=torch.float64) for found in (x.isnan(), x.isposinf(), x.isneginf(), x == 0)),
            torch.cat([x.where(finite, torch.inf), nothing]).amin(),
            torch.cat([x.where(finite, -torch.inf), -nothing]).amax(),
            scaled.sum(),
            torch.dot(scaled, scaled),
        ]
    )


def _clean_block(x: Tensor, scale: Tensor) -> Tensor:
    """Measure as `_block` does, where all values are known to be finite."""
    low, high = x.aminmax()
    zeros = x.numel() - x.count_nonzero()
    none = torch.zeros_like(low)
    scaled = x.div(scale)
    return torch.stack([none, none, none, zeros.to(torch.float64), low, high, scaled.sum(), torch.dot(scaled, scaled)])


def _float_stats(count: int, numbers: list[int], digest: int | None) -> Stats:
    *counts, low, high, total, squares, scale = struct.unpack(
        f"{len(numbers)}d", struct.pack(f"{len(numbers)}q", *numbers)
    )
    nan, pos_inf, neg_inf, zeros = (int(number) for number in counts)
    finite = count - nan - pos_inf - neg_inf
    if finite == 0:
        low = high = math.nan
    return Stats(
        count=count,
        nan=nan,
        pos_inf=pos_inf,
        neg_inf=neg_inf,
        zeros=zeros,
        min=low,
        max=high,
        mean=total / finite * scale if finite else math.nan,
        absmax=max(-low, high),
        l2=math.sqrt(squares) * scale,
        hash=digest,
    )


def _offset(dtype: torch.dtype) -> int:
    """Return what is taken from each value so that it fits int64."""
    return -_SIGN if dtype == torch.uint64 else 0


def _measure_integers(values: Tensor) -> Tensor:
    """Measure a flat integer or bool tensor: int64 numbers in the order that `_integer_stats` reads.

    Sums are of the two halves of each number, and so exact up to 2^31 numbers.
    """
    if values.numel() == 0:
        return torch.zeros(6, dtype=torch.int64, device=values.device)
    table = torch.stack([_integer_block(block) for block in _blocks(values)])
    squares = table[:, 5].view(torch.float64).sum().view(torch.int64)
    return torch.stack([table[:, 0].sum(), table[:, 1].amin(), table[:, 2].amax(), *table[:, 3:5].sum(0), squares])


def _integer_block(block: Tensor) -> Tensor:
    """Measure one block: zeros, extremes, sums of the upper and lower halves, bits of the sum of squares."""
    offset = _offset(block.dtype)
    x = block.view(torch.int64).bitwise_xor(_SIGN) if offset else block.to(torch.int64)
    low, high = x.aminmax()
    wide = x.to(torch.float64)
    if offset:  # in halves: a small number less 2^63 is no longer told from others in float64
        bits = block.view(torch.int64)
        upper = (bits >> 32).bitwise_and_(0xFFFFFFFF).to(torch.float64)
        wide = upper.mul_(2.0**32).add_(bits.bitwise_and(0xFFFFFFFF).to(torch.float64))
    squares = torch.dot(wide, wide).view(torch.int64)
    return torch.stack([(x == -offset).sum(), low, high, (x >> 32).sum(), (x & _LOW_HALF).sum(), squares])


def _integer_stats(count: int, numbers: list[int], digest: int | None, offset: int) -> Stats:
    zeros, low, high, upper, lower, squares = numbers
    total = (upper << 32) + lower + count * offset
    extremes = (low + offset, high + offset) if count else (math.nan, math.nan)
    return Stats(
        count=count,
        nan=0,
        pos_inf=0,
        neg_inf=0,
        zeros=zeros,
        min=extremes[0],
        max=extremes[1],
        mean=total / count if count else math.nan,
        absmax=max(-extremes[0], extremes[1]),
        l2=math.sqrt(struct.unpack("d", struct.pack("q", squares))[0]),
        hash=digest,
    )
