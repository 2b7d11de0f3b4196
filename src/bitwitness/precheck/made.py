"""Inputs of like distribution, where a recording has kept the statistics of its values and not the values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_IGNORED = -100
"""What labels hold where there is none: of the numbers between it and zero none is a class."""


def made(
    dtype: torch.dtype,
    shape: Sequence[int],
    layout: Sequence[int] | None,
    seen: Mapping[str, Any],
    generator: torch.Generator,
) -> Tensor:
    """Return a tensor with the mean, the L2 norm, the extremes, the zeros, and the NaN and Inf of one that was recorded.

    Finite floating values are normal around the mean, cut at the extremes, which are both there; integers are uniform between
    them.

    Parameters
    ----------
    dtype, shape, layout
        Of the recorded tensor; ``layout``: its strides, None for its own order.
    seen
        Its statistics by the names of a recording's columns; what is absent or None is not known.
    generator
        Draws on the CPU.

    """
    count = math.prod(shape)
    low, high = seen.get("min"), seen.get("max")
    if dtype is torch.bool:
        share = seen.get("mean")
        flat = torch.rand(count, generator=generator) < (0.5 if share is None else share)
    elif dtype.is_floating_point or dtype.is_complex:
        flat = _floating(count * (2 if dtype.is_complex else 1), seen, generator)
        flat = torch.view_as_complex(flat.reshape(-1, 2)).to(dtype) if dtype.is_complex else flat.to(dtype)
    else:
        bottom, top = int(low or 0), int(high if high is not None else 1)
        least = 0 if bottom == _IGNORED else bottom
        flat = torch.randint(least, max(top, least) + 1, (count,), generator=generator).to(dtype)
        if count > 1 and low is not None:  # an index that is out of range shows only where the extremes are
            flat[0], flat[-1] = bottom, top
    tensor = flat.reshape(tuple(shape))
    return tensor if layout is None else torch.empty_strided(tuple(shape), tuple(layout), dtype=dtype).copy_(tensor)


def _floating(count: int, seen: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    mean, norm = seen.get("mean"), seen.get("l2")
    low, high = seen.get("min"), seen.get("max")
    wild = sum(max(int(seen.get(k) or 0), 0) for k in ("nan", "pos_inf", "neg_inf"))
    finite = max(count - wild, 1)
    middle = 0.0 if mean is None else float(mean)
    spread = 1.0 if norm is None else math.sqrt(max(float(norm) ** 2 / finite - middle**2, 0.0))
    flat = torch.randn(count, generator=generator, dtype=torch.float64) * spread + middle
    if low is not None and high is not None:
        flat.clamp_(float(low), float(high))
    order = torch.randperm(count, generator=generator)
    taken = 0
    for name, value in (("nan", math.nan), ("pos_inf", math.inf), ("neg_inf", -math.inf), ("zeros", 0.0)):
        some = min(max(int(seen.get(name) or 0), 0), count - taken)
        flat[order[taken : taken + some]] = value
        taken += some
    for extreme in (low, high):
        if extreme is not None and taken < count:
            flat[order[taken]] = float(extreme)
            taken += 1
    return flat
