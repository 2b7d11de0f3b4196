"""What a checksum by row reads of its operator's tensors, and by what rounding leaves it judges what it found."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitwitness.numerics import summing_dtype, unit_roundoff
from bitwitness.oracle.limits import ACCUMULATION, ROUNDING, accumulation_roundoff
from bitwitness.sense.invariant import Invariant, Signs, in_range, largest
from bitwitness.sense.matrixreading import UNDERFLOW, paired, times
from bitwitness.stats.reader import KINDS

_WIDTHS = range(8, (1 << 18) + 1)
"""Widths of rows that are checked: of narrower ones the sums are as many as the numbers, of wider ones, a flat parameter's, as
many signs would have to be kept."""
_ROOM = 4.0
"""Times what rounding is expected to leave: who looks for a wrong row here has room for kernels that nobody has measured."""
_SLACK = 0.1
"""By how much of it a norm may pass its bound."""


def is_readable(x: object) -> bool:
    """Tell whether a value is a tensor of which every row can be read."""
    if not isinstance(x, Tensor) or x.dtype not in KINDS or x.layout is not torch.strided:
        return False
    return x.dim() > 0 and x.shape[-1] in _WIDTHS and x.permute(_order(x)).is_contiguous()


def _order(x: Tensor) -> list[int]:
    """Return a tensor's dimensions in the order in which its rows lie in memory: heads and places may have changed places."""
    if x.is_contiguous():
        return list(range(x.dim()))
    return [*sorted(range(x.dim() - 1), key=x.stride, reverse=True), x.dim() - 1]


def _back(values: Tensor, x: Tensor, order: list[int]) -> Tensor:
    """Return values of rows that were read in this order as those of x's, ``x.shape[:-1]``."""
    leading = order[:-1]
    return values.view([x.shape[d] for d in leading]).permute([leading.index(d) for d in range(len(leading))])


def weighed(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x . v`` of each row, and the rows' norms, ``x.shape[:-1]`` each."""
    order = _order(x)
    sums, norms = times(x.permute(order).reshape(-1, x.shape[-1]), v[:, None])
    return _back(sums, x, order), _back(norms, x, order)


def pair_rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the dot products of the rows of two tensors, and either's norms, ``x.shape[:-1]`` each."""
    order = _order(x)
    found = paired(*(t.permute(order).reshape(1, 1, -1, t.shape[-1]) for t in (x, y)))
    dots, left, right = (_back(values, x, order) for values in found)
    return dots, left, right


def balance(name: str, out: Tensor, residual: Tensor, size: Tensor, *, weight: float, lost: float = 0.0) -> Invariant:
    """Judge residuals by what rounding leaves of rows of this size, for weights of this magnitude.

    ``lost``: what else rounding may leave, in units of ``u size``.
    """
    columns, info = int(out.shape[-1]), torch.finfo(out.dtype)
    sums = ACCUMULATION * accumulation_roundoff(out.dtype) * math.sqrt(columns)
    room = _ROOM * weight * ((ROUNDING + lost) * unit_roundoff(out.dtype) + sums)
    floor = weight * ROUNDING * math.sqrt(columns) * info.smallest_normal
    return largest(name, residual.abs(), size * room + floor, in_range(size, out.dtype))


def bounded(name: str, out: Tensor, norms: Tensor, bound: Tensor) -> Invariant:
    """Judge rows' norms, which are upper bounds, by what they cannot exceed."""
    floor = math.sqrt(out.shape[-1]) * (torch.finfo(out.dtype).smallest_normal + 2 * UNDERFLOW)
    return largest(name, (norms - bound).clamp_min(0), _SLACK * bound + floor, in_range(bound, out.dtype))


def signs_for(out: Tensor, signs: Signs) -> tuple[Tensor, float]:
    """Return signs for a result's rows, and their magnitude."""
    columns = int(out.shape[-1])
    return signs(columns, out.device, summing_dtype(out.dtype)), Signs.scale(columns)


def ones_for(out: Tensor) -> Tensor:
    """Return what adds a result's rows up."""
    return torch.ones(out.shape[-1], dtype=summing_dtype(out.dtype), device=out.device)
