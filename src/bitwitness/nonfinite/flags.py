"""Whether a tensor holds NaN or infinities: one sum on its device, and a closer look only where that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bitwitness.stats.local import as_reals, local_values


@dataclass(frozen=True, slots=True)
class Flags:
    """What non-finite values a tensor holds."""

    nan: bool = False
    pos: bool = False
    neg: bool = False

    def __bool__(self) -> bool:
        return self.nan or self.pos or self.neg

    @property
    def inf(self) -> bool:
        """Whether it holds an infinity of either sign."""
        return self.pos or self.neg


FINITE = Flags()


def measurable(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's values can be looked at: floating or complex, not empty, not on the meta device."""
    return (
        (tensor.is_floating_point() or tensor.is_complex())
        and tensor.device.type != "meta"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
    )


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    values = as_reals(local_values(tensor.detach()))
    return values.float() if values.dtype.itemsize == 1 else values


def _total(values: torch.Tensor) -> torch.Tensor:
    # In float32 at least: a float16 sum overflows where no value does.
    return values.sum(dtype=torch.float64 if values.dtype == torch.float64 else torch.float32)


def flags_of(tensor: torch.Tensor, *, nan_expected: bool = False) -> Flags:
    """Look at one tensor of a kind that `measurable` accepts; waits for its device.

    With ``nan_expected`` (it is computed from NaN) a tensor that is not finite is taken to hold NaN, and not looked at
    closer: after the first NaN most tensors of a step are such.
    """
    values = _reals(tensor)
    total = _total(values).item()
    if math.isfinite(total):
        return FINITE
    if nan_expected and math.isnan(total):
        return Flags(nan=True)
    low, high = torch.stack(torch.aminmax(values)).tolist()
    if not math.isnan(low):
        return Flags(pos=high == math.inf, neg=low == -math.inf)
    pos, neg = torch.stack([values.isposinf().any(), values.isneginf().any()]).tolist()
    return Flags(nan=True, pos=pos, neg=neg)


def all_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Tell of each tensor whether all its values are finite; waits once for a device."""
    usable = [measurable(tensor) for tensor in tensors]
    totals = [_total(_reals(tensor)) for tensor, use in zip(tensors, usable, strict=True) if use]
    if not totals:
        return [True] * len(tensors)
    home = totals[0].device
    sums = iter(torch.stack([total.to(home, torch.float64) for total in totals]).isfinite().tolist())
    return [not use or next(sums) or not flags_of(tensor) for tensor, use in zip(tensors, usable, strict=True)]
