"""What a reduction must conserve: weighted sums of what the ranks gave, against that of what came out.

The weights are random signs of a generator of our own, independent of the data. With x_i what rank i gave (n ranks, N
elements) and y the result, an element of y differs from the exact sum by at most (n - 1) u sum_i |x_i|, u being half the
dtype's eps (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2). The signed sum of such errors
exceeds t sqrt(sum_j b_j^2) with probability 2 exp(-t^2 / 2) at most (Hoeffding), whatever the errors are; and
sum_j b_j^2 <= ((n - 1) u)^2 n sum_i |x_i|_2^2. With t = 8 that is 3e-14. Integers are summed modulo 2^64 and agree exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PIECES = (
    64  # a long tensor is checked in so many pieces, so that what one element may weigh does not drown in the rest
)
_SHORTEST = 1 << 14  # elements
_T = 8.0
_OWN = 64.0 * 2.0**-53  # rounding of our own float64 sums, pairwise over at most 2^30 elements, with room
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def sums(dtype: torch.dtype) -> bool:
    """Tell whether sums of this dtype can be checked."""
    return dtype in _FLOATS or dtype in _INTEGERS


def piece_length(numel: int, pieces: int = _PIECES) -> int:
    """Return the length of the pieces of a tensor: a power of two, so that few different weights are needed."""
    return max(_SHORTEST, 1 << math.ceil(math.log2(max(1, math.ceil(numel / pieces)))))


class Projector:
    """Sums tensors with random signs.

    Parameters
    ----------
    seed
        Of the weights' own generator; the same on every rank.

    """

    def __init__(self, seed: int = 0x5EED) -> None:
        self._seed = seed
        self._kept: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def signs(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return ``[length]`` signs, the same ones for the same length on every rank."""
        full = 1 << math.ceil(math.log2(max(length, _SHORTEST)))
        key = full, device, dtype
        if key not in self._kept:
            generator = torch.Generator().manual_seed(self._seed)
            bits = torch.randint(2, (full,), generator=generator, dtype=torch.int8)
            self._kept[key] = (bits * 2 - 1).to(device, dtype)
        return self._kept[key][:length]

    def project(self, tensor: Tensor, length: int) -> Tensor:
        """Return the signed sums of a tensor's pieces: float64, or int64 modulo 2^64, [pieces], on its device."""
        flat = tensor.reshape(-1)
        wide = torch.float64 if tensor.dtype.is_floating_point else torch.int64
        return torch.stack([_dot(p.to(wide), self.signs(len(p), p.device, wide)) for p in flat.split(length)])

    def project_and_square(self, tensor: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the same of a floating tensor, and the sums of its squares: float64 [pieces], each."""
        found, squares = [], []
        for piece in tensor.reshape(-1).split(length):
            wide = piece.double()
            found.append(_dot(wide, self.signs(len(wide), wide.device, torch.float64)))
            squares.append(_dot(wide, wide))
        return torch.stack(found), torch.stack(squares)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b) if a.is_floating_point() else (a * b).sum()


def tolerance(squares: Tensor, size: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return by how much signed sums may differ.

    Parameters
    ----------
    squares
        float64 [pieces], sums over the ranks of the squares of what they gave.
    size, length
        Number of ranks, and of a piece's elements.
    dtype
        Of what was reduced.

    """
    info = torch.finfo(dtype)
    whole = (size * squares).sqrt()  # bounds every element of the sum, too
    rounding = size * info.eps / 2 * _T * whole  # one more than n - 1: a mean is divided once
    return rounding + _OWN * math.sqrt(length) * whole + size * length * info.tiny


def may_overflow(squares: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return where a sum may leave the dtype's range by itself, or what was given was not finite: bool [pieces]."""
    return ~((size * squares).sqrt() < torch.finfo(dtype).max / 2)


def bits_of(dtype: torch.dtype) -> int:
    """Return how many bits of an integer sum count: what wraps around in a narrow dtype does not in int64."""
    return 8 * dtype.itemsize


def same_integers(a: Tensor, b: Tensor, bits: int) -> bool:
    """Tell whether sums agree modulo 2^bits."""
    mask = -1 if bits == 64 else (1 << bits) - 1
    return torch.equal(a & mask, b & mask)
