"""How large the terms are that a result is made of: what rounding leaves in one that cancelled is relative to them.

The size of the terms is read off an operator of any formula: each element of its inputs is changed by a small share of itself,
with a random sign, and what becomes of the result, over that share, is the root of the sum of the squared terms, to first
order. Of a sum these are its elements, of a product the products; of a backward they are as small as the gradient that it was
given, however large its other inputs are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwitness.oracle.float64 import run_in_float64, to_float64
from bitwitness.tap.compat import OpOverload

_STEP = 2.0**-16
"""Share of itself by which an element is changed: small enough for the first order, large enough for float64's rounding."""
_DRAWS = 4
"""How often signs are drawn: in the only element of a result, terms may cancel that are large."""


def term_sizes(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], exact: Sequence[Tensor]
) -> list[float]:
    """Return the L2 size of the terms of each result, in float64; 0 for one that is not floating.

    ``exact``: the results that float64 gives for these arguments. Raises whatever the operator raises.
    """
    generator = torch.Generator().manual_seed(0)
    squares = [0.0] * len(exact)
    for _ in range(_DRAWS):
        moved = run_in_float64(func, *_moved((list(args), dict(kwargs)), generator))
        for index, (one, other) in enumerate(zip(moved, exact, strict=True)):
            squares[index] += _gap(one, other) ** 2 / _DRAWS
    return [math.sqrt(square) / _STEP for square in squares]


def _moved(value: Any, generator: torch.Generator) -> Any:
    """Return arguments in float64 of which every floating element is changed a little."""
    if isinstance(value, Tensor):
        wide = to_float64(value)
        if not wide.is_floating_point() or wide.layout is not torch.strided:
            return wide
        signs = torch.randint(0, 2, wide.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        return wide * (1.0 + _STEP * signs)
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, generator) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, generator) for key, item in value.items()}
    return value


def _gap(one: Tensor, other: Tensor) -> float:
    """Return the L2 distance of the elements that are finite in both."""
    if not one.is_floating_point() or one.layout is not torch.strided:
        return 0.0
    gap = (one - other).detach()
    return float(torch.where(gap.isfinite(), gap, 0.0).norm())
