"""Casts to float8: a part of what a function computes, no error of it. A number next to a boundary may fall to either side."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwitness.numerics import FLOAT8, smallest_number, unit_roundoff
from bitwitness.oracle.noise import Noise
from bitwitness.tap.compat import OpOverload

_OFF = 2.0
"""Roundings of the dtype in which a number is read that it may be off by, beside what noise moved it by before."""


def is_quantisation(func: OpOverload, kept: torch.dtype) -> bool:
    """Whether an operator casts to a float8 type, in which its result is ``kept``."""
    return kept in FLOAT8 and func.overloadpacket.__name__ == "_to_copy"


def quantised(wide: Tensor, kept: torch.dtype) -> Tensor:
    """Return the numbers of a float8 type that float64 ones are cast to, in float64; as torch casts, beyond its range, too."""
    return wide.to(kept).to(torch.float64)


def read_off(noise: Noise, wide: Tensor, read: torch.dtype) -> Tensor:
    """Return numbers as they may be when they are cast, on either side of a boundary that is near.

    What is a number of the dtype ``read`` is known exactly: nothing has rounded it.
    """
    if wide.layout is not torch.strided or read not in (torch.float16, torch.bfloat16, torch.float32):
        return wide
    known = wide.to(read).double() == wide
    return torch.where(known, wide, wide + wide * noise.sides(wide) * (_OFF * unit_roundoff(read)))


def loss_of(noise: Noise, wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers off by up to what a cast to a float8 type takes from them, scaled so that the largest one fits.

    That is a rounding of each, and half the distance of the smallest numbers, in units of the largest.
    """
    if not wide.is_floating_point() or not wide.numel():
        return wide
    floor = float(wide.abs().max()) / torch.finfo(dtype).max * smallest_number(dtype) / 2
    return noise.moved(wide, unit_roundoff(dtype)) + noise.signs(wide, floor)
