"""A call's arguments as Python source, for a reproducer: nothing but literals and names of torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def call_source(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Return ``function(tensors["t0"], 2.0, dim=1)`` and the tensors that it names; an empty source for what has no literal."""
    tensors: dict[str, Tensor] = {}

    def named(tensor: Tensor) -> str:
        name = next((n for n, t in tensors.items() if t is tensor), f"t{len(tensors)}")
        tensors[name] = tensor
        return f'tensors["{name}"]'

    try:
        parts = [literal(a, named) for a in args] + [f"{key}={literal(v, named)}" for key, v in kwargs.items()]
    except TypeError:
        return "", tensors
    return f"{function}({', '.join(parts)})", tensors


def literal(value: Any, named: Callable[[Tensor], str]) -> str:
    """Return a value as source; raises TypeError where it has none."""
    if isinstance(value, Tensor):
        return named(value)
    if value is None or isinstance(value, bool | int | str | torch.dtype | torch.layout | torch.memory_format):
        return repr(value)
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({value.real!r}, {value.imag!r})"
    if isinstance(value, slice):
        return f"slice({', '.join(literal(v, named) for v in (value.start, value.stop, value.step))})"
    if isinstance(value, list | tuple):
        inner = ", ".join(literal(v, named) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
    raise TypeError(f"{type(value).__name__} has no literal")
