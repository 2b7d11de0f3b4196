"""A sum with random weights: one number that tells orders of the same values apart, and how far two tensors are from another.

The sketch of Alon, Matias and Szegedy ("The space complexity of approximating the frequency moments", 1996). It is linear: two
tensors' sketches differ by the sketch of their difference, and a sketch is, up to a factor that is normally distributed, the
L2 norm of what it is taken of. So ``|sketch(a) - sketch(b)| / norm(a)`` estimates the relative L2 error from two numbers that
were taken in two runs, where means and norms of large tensors hide what differs in few places, or lies elsewhere. The weights
are no mere signs: a few equal numbers, as in labels, masks and one-hot gradients, would often come to the same sum elsewhere.
"""

from __future__ import annotations

import math
import operator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwitness.stats.local import as_reals

_Words = npt.NDArray[np.uint64]
BLOCK = 1 << 15  # elements that share their weights' pattern; 128 KiB of float32 stay in a core's cache
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)."""
_SMALLEST, _LARGEST = 0.5, (45**0.5 - 1) / 4
"""Between which the weights' sizes lie evenly: the mean of their squares is 1."""
_STEPS = 1 << 14
"""Steps in 1 that the sizes are multiples of: so sums of whole numbers are exact up to 5e11, whoever adds them up."""
_OF_BLOCKS = 1 << 40  # where the blocks' own signs begin in the sequence


def sketch(values: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, each with the weight that its place has.

    Parameters
    ----------
    values
        Contiguous, float32 or float64; finite, or the sketch is NaN.

    Returns
    -------
    Tensor
        0-d, of the same dtype, on the same device. Element i has a weight made of x = splitmix64(i mod 32,768): its top bit
        is the sign, ((x >> 8) mod 15,188 + 8,192) / 16,384 the size, whose square is 1 in the mean; times the sign of its
        block of 32,768 where there is more than one.

    """
    flat = values.reshape(-1)
    count = flat.numel()
    if count <= BLOCK:
        return torch.dot(flat, first_weights(count, flat.dtype, flat.device))
    whole = count // BLOCK
    sums = torch.mv(flat[: whole * BLOCK].view(whole, BLOCK), first_weights(BLOCK, flat.dtype, flat.device))
    # Blocks are known by powers of two, so that few lists of signs are made.
    blocks = signs_of_blocks(1 << whole.bit_length(), flat.dtype, flat.device)
    total = torch.dot(sums, blocks[:whole])
    rest = count - whole * BLOCK
    if not rest:
        return total
    return total + blocks[whole] * torch.dot(flat[-rest:], first_weights(rest, flat.dtype, flat.device))


def sketch_rows(rows: Tensor) -> Tensor:
    """Return the sketch of each row of a matrix, ``[R]``: the same for a row whatever the others are, and however many.

    Rows are no longer than a block, 32,768. Where `sketch` takes a dot product, this takes a sum, whose rounding differs.
    """
    return (rows * first_weights(rows.shape[1], rows.dtype, rows.device)).sum(1)


def exact_sketch(values: Tensor) -> float | None:
    """Return the sketch of any plain tensor, taken in float64; None where a value is not finite."""
    if not values.numel():
        return 0.0
    found = float(sketch(as_reals(values).to(torch.float64).contiguous()))
    return found if math.isfinite(found) else None


def block_sums(part: Tensor) -> list[float]:
    """Return the weighted sum of each block of 32,768 elements of a flat CPU tensor; the last may be shorter."""
    count = part.numel()
    whole, rest = divmod(count, BLOCK)
    sums: list[float] = []
    if whole:
        blocks = (part[: whole * BLOCK] if rest else part).view(whole, BLOCK)
        sums = torch.mv(blocks, first_weights(BLOCK, part.dtype, part.device)).tolist()
    if rest:
        last = part[whole * BLOCK :] if whole else part
        sums.append(torch.dot(last, first_weights(rest, part.dtype, part.device)).item())
    return sums


def of_blocks(sums: list[float]) -> float:
    """Return the sketch of a tensor of which these are the blocks' sums, NaN where one is not finite."""
    if len(sums) == 1:
        return sums[0]
    if not all(map(math.isfinite, sums)):
        return math.nan
    # Blocks are known by powers of two, so that few lists of signs are made.
    return math.fsum(map(operator.mul, sums, _listed_signs(1 << (len(sums) - 1).bit_length())))


@lru_cache(maxsize=4096)
def first_weights(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weights of a block's first ``count`` elements."""
    return _weights(dtype, device)[:count]  # a view: the sizes of a model's tensors come again and again


@lru_cache(maxsize=16)
def _weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    x = _random(0, BLOCK)
    least, count = math.ceil(_SMALLEST * _STEPS), math.floor((_LARGEST - _SMALLEST) * _STEPS)
    sizes = (least + ((x >> np.uint64(8)) % np.uint64(count)).astype(np.float64)) / _STEPS
    return torch.from_numpy(_signs(x) * sizes).to(device=device, dtype=dtype)


@lru_cache(maxsize=64)
def signs_of_blocks(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the signs of the first ``count`` blocks."""
    return torch.from_numpy(_signs(_random(_OF_BLOCKS, count))).to(device=device, dtype=dtype)


@lru_cache(maxsize=64)
def _listed_signs(count: int) -> list[float]:
    signs: list[float] = _signs(_random(_OF_BLOCKS, count)).tolist()
    return signs


def _signs(x: _Words) -> npt.NDArray[np.float64]:
    return 1.0 - 2.0 * (x >> np.uint64(63)).astype(np.float64)


def _random(first: int, count: int) -> _Words:
    with np.errstate(over="ignore"):
        x = (np.arange(first + 1, first + count + 1, dtype=np.uint64)) * np.uint64(_STEP)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    found: _Words = x ^ (x >> np.uint64(31))
    return found
