"""An operator run again in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bitwitness.numerics import PACKED
from bitwitness.oracle.kernels import kernel_of, named_arguments
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.operators import tensors_in


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for a floating dtype, complex128 for a complex one, and any other, packed ones too, as it is."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point and dtype not in PACKED else dtype


def each_argument(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return an operator's arguments with each of them changed: lists, tuples and dicts are gone through."""
    if isinstance(value, list | tuple):
        return type(value)(each_argument(item, change) for item in value)
    if isinstance(value, dict):
        return {key: each_argument(item, change) for key, item in value.items()}
    return change(value)


def widened(value: Any) -> Any:
    """Return an operator's arguments with every floating dtype, and every tensor of one, as wide as float64, on the CPU."""

    def wide(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            if one._is_zerotensor():  # of forward-mode derivatives: without memory
                return torch.zeros(one.shape, dtype=wide_dtype(one.dtype))
            return one.to("cpu", wide_dtype(one.dtype))
        if isinstance(one, torch.dtype):
            return wide_dtype(one)
        return torch.device("cpu") if isinstance(one, torch.device) else one

    return each_argument(value, wide)


def to_float64(value: Any) -> Any:
    """Return an operator's arguments as float64 takes them.

    Floating tensors become detached float64 tensors on the CPU, other tensors move there, floating dtypes become float64 and
    devices the CPU (an operator that casts or creates would leave float64 otherwise). What is float64 on the CPU already is
    not copied, and complex numbers keep their precision.
    """

    def wide(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return one.detach().cpu().double() if one.is_floating_point() else one.detach().cpu()
        if isinstance(one, torch.dtype):
            return torch.float64 if one.is_floating_point else one
        return torch.device("cpu") if isinstance(one, torch.device) else one

    return each_argument(value, wide)


def run_in_float64(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the tensors that an operator gives for these arguments in float64, flat, in order.

    Of an operator that only an accelerator has (`oracle.kernels`) those that follow from the arguments, which come first.
    Raises whatever the operator raises: not every one takes float64, or exists on the CPU.
    """
    args, kwargs = to_float64(list(args)), to_float64(dict(kwargs))
    if kernel := kernel_of(func):
        return tensors_in(kernel(named_arguments(func, args, kwargs)))
    return tensors_in(func(*args, **kwargs))
