"""The tensors that a module is given and returns, by the names of their places: ``in0``, ``in.mask``, ``out.logits``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a module's arguments or results with slot names: ``in0``, ``in.mask``, ``out.logits``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):  # a transformers output is one, too
        for key, item in value.items():
            yield from named_tensors(
                item, f"{name.rstrip('0123456789')}.{key}" if name[-1].isdigit() else f"{name}.{key}"
            )
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from named_tensors(item, f"{name}.{i}")


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a call's arguments with their slots."""
    for i, value in enumerate(args):
        yield from named_tensors(value, f"in{i}")
    for key, value in kwargs.items():
        yield from named_tensors(value, f"in.{key}")


def results_of(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a result with their slots."""
    if isinstance(result, list | tuple):
        for i, item in enumerate(result):
            yield from named_tensors(item, f"out{i}")
    elif isinstance(result, dict):
        yield from named_tensors(result, "out")
    else:
        yield from named_tensors(result, "out0")
