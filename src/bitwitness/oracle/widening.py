"""A call's arguments: made as wide as float64, looked through for tensors and for the dtype that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwitness.oracle.float64 import wide_dtype
from bitwitness.tap.compat import OpOverload


def is_view(func: OpOverload) -> bool:
    """Whether an operator returns a view of what it was given."""
    return not func._schema.is_mutable and any(r.alias_info is not None for r in func._schema.returns)


def widened(value: Any) -> Any:
    """Return an operator's arguments with every floating dtype, and every tensor of one, as wide as float64, on the CPU."""
    if isinstance(value, Tensor):
        return value.to("cpu", wide_dtype(value.dtype))
    if isinstance(value, torch.dtype):
        return wide_dtype(value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list | tuple):
        return type(value)(widened(v) for v in value)
    if isinstance(value, dict):
        return {k: widened(v) for k, v in value.items()}
    return value


def tensors_in_all(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [t for v in values for t in tensors_in_all(v)] if isinstance(values, list | tuple) else []


def asked_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the floating dtype that a call asks for; not float64, which is what a tensor that was made wide asks for, too."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex):
            real = value.to_real() if value.is_complex else value
            return None if real is torch.float64 else real
    return None
