"""In which order one run's values lie in the other: transposed, flipped, shifted, permuted along a dimension.

Slices along a dimension are told apart by a random projection in float64; what these say is checked by the values themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bitwitness.comparison.measuring.tensors import same_bits

_LARGEST = 1 << 26
"""Elements beyond which nothing is looked for: a projection takes memory of eight bytes for each."""
_MOST_DIMENSIONS = 5
_SHIFTS = 8
"""Places by which a shift is looked for that drops what it pushes over the end."""


def order_in_words(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Say how to get B's values by moving those of A; None where no simple movement is found."""
    if a.dtype != b.dtype or not 0 < a.numel() <= _LARGEST or a.numel() != b.numel() or a.dim() > _MOST_DIMENSIONS:
        return None
    if same_bits(a, b):
        return None
    if (transposed := _transposed(a, b)) is not None:
        return transposed
    if a.shape != b.shape:
        return "the same values in another shape" if same_bits(a.reshape(-1), b.reshape(-1)) else None
    found = [words for d in range(a.dim()) if a.shape[d] > 1 and (words := _along(a, b, d)) is not None]
    return found[0] if found else None


def _transposed(a: torch.Tensor, b: torch.Tensor) -> str | None:
    for i in range(a.dim()):
        for j in range(i + 1, a.dim()):
            turned = a.transpose(i, j)
            if turned.shape == b.shape and same_bits(turned, b):
                return f"transposed (dimensions {i} and {j})"
    return None


def _along(a: torch.Tensor, b: torch.Tensor, dim: int) -> str | None:
    """Return the movement of slices along one dimension."""
    size = a.shape[dim]
    keys_a, keys_b = _keys(a, dim), _keys(b, dim)
    places = {key: i for i, key in reversed(list(enumerate(keys_a)))}
    order = [places.get(key, -1) for key in keys_b]
    if -1 not in order and len(places) == size and sorted(order) == list(range(size)):
        index = torch.tensor(order)
        return _named(order, dim) if same_bits(a.index_select(dim, index), b) else None
    for by in range(1, min(_SHIFTS, size // 2) + 1):  # what pushes more than half over the end shows too little
        rest = size - by
        if len({*keys_b[:rest]}) < 2 or len({*keys_b[by:]}) < 2:
            continue  # slices that are all alike lie in any order
        if keys_a[by:] == keys_b[:rest] and same_bits(a.narrow(dim, by, rest), b.narrow(dim, 0, rest)):
            return f"shifted by {by} towards the beginning of dimension {dim}"
        if keys_a[:rest] == keys_b[by:] and same_bits(a.narrow(dim, 0, rest), b.narrow(dim, by, rest)):
            return f"shifted by {by} towards the end of dimension {dim}"
    return None


def _named(order: Sequence[int], dim: int) -> str:
    """Name an order: the place in A of each of B's slices."""
    size = len(order)
    moved = [i for i, place in enumerate(order) if place != i]
    if len(moved) == 2 and size > 2:
        return f"slices {moved[0]} and {moved[1]} of dimension {dim} swapped"
    if list(order) == list(range(size))[::-1]:
        return f"flipped along dimension {dim}"
    if all(place == (i + order[0]) % size for i, place in enumerate(order)):
        by = order[0]
        return f"rolled by {-by if by <= size // 2 else size - by} along dimension {dim}"
    return f"permuted along dimension {dim}, {len(moved)} of {size} slices"


def _keys(values: torch.Tensor, dim: int) -> list[float]:
    """Return a number for each slice along a dimension, the same for the same values only."""
    rows = values.movedim(dim, 0).reshape(values.shape[dim], -1)
    rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    rows = rows.to(torch.float64).nan_to_num(nan=0.5, posinf=3e300, neginf=-3e300)
    weights = torch.rand(rows.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return list((rows * weights).sum(1).tolist())
