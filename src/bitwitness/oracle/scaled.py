"""Products of float8 and block-scaled numbers, written in float64: each number times its scale, multiplied, added up.

What the quantisation lost is in the numbers already; what is left to judge is the kernel. Scales come for the whole tensor,
for each row, for blocks of 128 x 128 or 1 x 128 (DeepSeek), of 32 (OCP Microscaling Formats 1.0) or of 16 (NVFP4), the last two
in the order in which cuBLAS wants them ("1D block scaling factors layout" of its manual).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwitness.oracle.kernels import named_arguments
from bitwitness.tap.compat import OpOverload

_PRODUCTS = frozenset(("_scaled_mm", "_scaled_mm_v2"))
_BLOCKS = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}
"""Along the summed dimension, how many numbers share a scale of that dtype."""
_SQUARE = 128
_TILE_ROWS, _TILE_COLUMNS = 128, 4
"""Scales of blocks are stored in tiles of so many."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP's E2M1 by its three bits below the sign
KeptAs = Callable[[Tensor], torch.dtype]


def is_scaled_product(func: OpOverload) -> bool:
    """Whether an operator multiplies numbers that come with their scales."""
    return func.namespace == "aten" and func.overloadpacket.__name__ in _PRODUCTS


def scaled_product(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kept_as: KeptAs) -> Tensor:
    """Return what a scaled product should be, in float64, ``[M, N]``.

    Parameters
    ----------
    func, args, kwargs
        The call; its numbers in float64, packed ones as they are.
    kept_as
        In which dtype the device keeps one of the tensors.

    Raises
    ------
    ValueError
        If scales have a shape that fits no way of scaling.

    """
    named = named_arguments(func, args, kwargs)
    a, b = _scaled(named["self"], "a", named, kept_as), _scaled(named["mat2"].t(), "b", named, kept_as)
    found = torch.mm(a, b.t())
    if (bias := named.get("bias")) is not None:
        found = found + bias.double()
    return found if (after := named.get("scale_result")) is None else found * after.double()


def _scaled(numbers: Tensor, which: str, named: Mapping[str, Any], kept_as: KeptAs) -> Tensor:
    """Return one factor's numbers ``[rows, K]`` times their scales."""
    found = _unpacked(numbers)
    scales, order = named[f"scale_{which}"], named.get(f"swizzle_{which}") or []
    for i, scale in enumerate(scales if isinstance(scales, list | tuple) else [scales]):
        block = _BLOCKS.get(kept_as(scale), 0)
        in_tiles = bool(block) and (bool(order[i]) if i < len(order) else "swizzle_a" not in named)
        found = found * _spread(scale.double(), found, block, in_tiles=in_tiles)
    return found


def _spread(scale: Tensor, of: Tensor, block: int, *, in_tiles: bool) -> Tensor:
    """Return scales as a tensor that multiplies the numbers ``of``, ``[rows, K]``."""
    rows, depth = of.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if block:
        columns = math.ceil(depth / block)
        if in_tiles:
            scale = _out_of_tiles(scale, rows, columns)
        elif scale.shape != (rows, columns):
            scale = scale.t()
        if scale.shape == (rows, columns):
            return scale.repeat_interleave(block, dim=1)[:, :depth]
    if (scale.numel() == rows and 1 in scale.shape) or scale.shape == (rows,):
        return scale.reshape(rows, 1)
    squares = math.ceil(depth / _SQUARE)
    for one in (scale, scale.t() if scale.dim() == 2 else scale):
        if one.shape == (rows, squares):
            return one.repeat_interleave(_SQUARE, dim=1)[:, :depth]
        if one.shape == (math.ceil(rows / _SQUARE), squares):
            return one.repeat_interleave(_SQUARE, dim=0).repeat_interleave(_SQUARE, dim=1)[:rows, :depth]
    raise ValueError(f"scales {list(scale.shape)} fit no known way of scaling numbers {[rows, depth]}")


def _out_of_tiles(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return scales ``[rows, columns]`` that are stored in tiles of 128 x 4, each as 32 rows of four times four.

    Raises ValueError if there are not as many as such tiles hold.
    """
    down, across = math.ceil(rows / _TILE_ROWS), math.ceil(columns / _TILE_COLUMNS)
    if scale.numel() != down * _TILE_ROWS * across * _TILE_COLUMNS:
        raise ValueError(
            f"{scale.numel()} scales do not fill {down} x {across} tiles of {_TILE_ROWS} x {_TILE_COLUMNS}"
        )
    tiles = scale.contiguous().reshape(down, across, 32, 4, _TILE_COLUMNS).transpose(2, 3)
    whole = tiles.reshape(down, across, _TILE_ROWS, _TILE_COLUMNS).transpose(1, 2)
    return whole.reshape(down * _TILE_ROWS, across * _TILE_COLUMNS)[:rows, :columns]


def _unpacked(numbers: Tensor) -> Tensor:
    """Return numbers ``[rows, K]`` in float64; of packed float4 each byte holds two, the lower half first."""
    if numbers.dtype is not torch.float4_e2m1fn_x2:
        return numbers.double()
    codes = numbers.contiguous().view(torch.uint8)
    both = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(1).long()
    values = torch.tensor([*_FP4, *(-v for v in _FP4)], dtype=torch.float64)
    return values[both]
