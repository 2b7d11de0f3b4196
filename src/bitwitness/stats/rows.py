"""Figures of a matrix of activations that is read once, in part: largest magnitude, norm, largest row, zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.stats.local import local_values


def sample(value: Tensor, most: int, turn: int) -> Tensor:
    """Return some rows of a tensor, [rows, columns]: about ``most`` elements, a view wherever possible.

    Parameters
    ----------
    value
        Of any floating dtype and layout; of a DTensor the local shard is read. Rows are what is innermost in memory.
    most
        Elements; of a larger tensor every k-th row is returned.
    turn
        Where to begin among the k; counted on, every row has its turn.

    """
    value = local_values(value)
    if value.dim() > 1 and not value.is_contiguous():
        value = value.permute(sorted(range(value.dim()), key=value.stride, reverse=True))
        while not value.is_contiguous() and value.dim() > 1 and value.numel() > most:
            value = value.select(0, turn % value.shape[0])  # no rows of it lie evenly apart
    rows = value.reshape(-1, value.shape[-1]) if value.dim() > 1 else value.reshape(1, -1)
    every = min(-(-rows.numel() // max(most, 1)), rows.shape[0])
    return rows[turn % every :: every] if every > 1 else rows


@dataclass(frozen=True, slots=True)
class RowFigures:
    """What one reading of [R, C] leaves on the device: float32 norms of the rows [R]; lowest, highest, count of non-zeros."""

    norms: Tensor
    low: Tensor
    high: Tensor
    nonzero: Tensor
    size: int

    @classmethod
    def of(cls, rows: Tensor) -> RowFigures:
        """Read a matrix."""
        if rows.dtype != torch.float64:
            rows = rows.float()
        low, high = rows.aminmax()
        return cls(torch.linalg.vector_norm(rows, dim=1), low, high, torch.count_nonzero(rows), rows.numel())


def figures_of(read: Sequence[RowFigures]) -> Tensor:
    """Return largest magnitude, L2, largest norm of a row, and the count of zeros of each of K, float32 [K, 4]."""
    norms = [one.norms for one in read]
    device = norms[0].device
    columns = [
        torch.stack([torch.maximum(one.high, -one.low).to(device, torch.float32) for one in read]),
        torch.stack([norm.to(device, torch.float32) for norm in torch._foreach_norm(norms)]),
        torch.stack([norm.to(device, torch.float32) for norm in torch._foreach_max(norms)]),
        torch.tensor([one.size for one in read], device=device).float()
        - torch.stack([one.nonzero.to(device) for one in read]).float(),
    ]
    return torch.stack(columns, 1)
