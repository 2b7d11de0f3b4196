"""MindSpore's fault injection operator GenerateEodMaskV2, for models that place it in their forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bitwitness.errors import UsageError
from bitwitness.inject import patterns

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ERROR_MODES = ("cycle", "specific")
FLIP_MODES = ("bitflip", "bitflip_designed", "multiply", "multiply_max")


class _Replaced(torch.autograd.Function):
    """Give other values to a tensor in the forward; its gradient passes unchanged."""

    @staticmethod
    def forward(_ctx: Any, _x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def eod_mask_v2(
    x: torch.Tensor,
    ele_pos: int | Sequence[int] | torch.Tensor,
    cur_step: int | torch.Tensor,
    seed: int | torch.Tensor = 0,
    offset: int | torch.Tensor = 0,
    start: int = 0,
    steps: int | Sequence[int] = 1,
    error_mode: str = "cycle",
    flip_mode: str = "bitflip",
    multiply_factor: float = 0.0,
    bit_pos: int = 0,
    flip_probability: float = 0.0,
) -> torch.Tensor:
    """Return ``x``, corrupted in the steps that the arguments name; the gradient passes unchanged.

    The semantics are those of the operator's CPU kernel (MindSpore, ``generate_eod_mask_v2_kernel.cc``), but
    for which elements a ``flip_probability`` picks: those depend there on the number of cores.

    Parameters
    ----------
    x
        Any shape; bfloat16, float16 or float32.
    ele_pos
        Flat index of the element to strike, or several.
    cur_step, start, steps, error_mode
        With ``passed = cur_step - start``: ``cycle`` strikes when ``passed > 0`` and ``steps[0]`` divides it,
        ``specific`` when ``passed >= 0`` is in ``steps``.
    flip_mode
        ``bitflip``: inverts bit ``bit_pos``, counted from the most significant (0 = sign).
        ``bitflip_designed``: sets the highest exponent bit that is 0. ``multiply``: times
        ``multiply_factor``. ``multiply_max``: every element becomes the largest magnitude,
        whatever ``ele_pos`` says.
    flip_probability
        Above 0, strikes each element with this probability (drawn from ``seed + offset``), not ``ele_pos``.

    Raises
    ------
    UsageError
        An argument is not among these, or ``ele_pos`` or ``bit_pos`` does not exist in ``x``.

    """
    for name, given, known in (("error_mode", error_mode, ERROR_MODES), ("flip_mode", flip_mode, FLIP_MODES)):
        if given not in known:
            raise UsageError(f"eod_mask_v2: {name} = {given!r}, expected one of {', '.join(known)}")
    if x.dtype not in DTYPES:
        raise UsageError(f"eod_mask_v2: x is {x.dtype}, expected bfloat16, float16 or float32; cast it first")
    if not _fires(int(cur_step) - start, [steps] if isinstance(steps, int) else list(steps), error_mode):
        return x
    where = torch.as_tensor(ele_pos, dtype=torch.int64).reshape(-1).tolist()
    values = _struck(x.detach(), where, int(seed) + int(offset), flip_mode, multiply_factor, bit_pos, flip_probability)
    replaced: torch.Tensor = _Replaced.apply(x, values)  # type: ignore[no-untyped-call]
    return replaced


@torch.library.custom_op(
    "bitwitness::generate_eod_mask_v2",
    mutates_args=(),
    schema="(Tensor x, int[] ele_pos, int seed, str flip_mode, float factor, int bit_pos, float probability) -> Tensor",
)
def _struck(
    x: torch.Tensor,
    ele_pos: list[int],
    seed: int,
    flip_mode: str,
    factor: float,
    bit_pos: int,
    probability: float,
) -> torch.Tensor:
    """Return the corrupted copy: one operator to torch, as the original is one to MindSpore."""
    if flip_mode == "multiply_max":
        return patterns.multiply_max(x, None)
    positions = _positions(x, ele_pos, seed, probability)
    if flip_mode == "bitflip":
        width = patterns.FORMATS[x.dtype].width  # the reference counts from the sign
        if not 0 <= bit_pos < width:
            name = str(x.dtype).removeprefix("torch.")
            raise UsageError(f"there is no bit {bit_pos} in {name}; expected 0 (the sign) to {width - 1}")
        return patterns.flip_bit(x, positions, width - 1 - bit_pos)
    if flip_mode == "bitflip_designed":
        return patterns.raise_exponent(x, positions)
    cast = float(torch.tensor(factor, dtype=x.dtype))  # the kernel casts the factor, too
    return patterns.multiply(x, positions, cast)


def _fires(passed: int, steps: list[int], error_mode: str) -> bool:
    if error_mode == "specific":
        return passed >= 0 and passed in steps
    if not steps or steps[0] < 1:
        raise UsageError(f"eod_mask_v2: steps = {steps}, expected a first step of 1 or more for error_mode 'cycle'")
    return passed > 0 and passed % steps[0] == 0


def _positions(x: torch.Tensor, ele_pos: list[int], seed: int, probability: float) -> patterns.Positions:
    if probability > 0.0:
        return np.flatnonzero(np.random.default_rng(abs(seed)).random(x.numel()) <= probability)
    where = np.asarray(ele_pos, dtype=np.int64)
    if where.size and not (where.min() >= 0 and where.max() < x.numel()):
        raise UsageError(f"eod_mask_v2: ele_pos = {where.tolist()}, but x has {x.numel()} elements, counted from 0")
    return where
