"""Tensors inside the nested arguments and results of a module: walked, replaced, counted.

Wider than ``torch.utils._pytree`` on purpose: a module may return a dataclass that nobody registered, and a tensor that
is overlooked there would make the guard blind without a word.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with each tensor replaced by ``change(tensor)``; containers are copied, other leaves shared.

    Understands tuples, named tuples, lists, mappings (Hugging Face's ``ModelOutput`` among them) and dataclasses.
    A container without tensors is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        return _map_mapping(value, change)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else _same_kind(value, items)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, change)
    return value


def _same_kind(value: tuple[Any, ...], items: list[Any]) -> Any:
    return tuple(items) if type(value) is tuple else type(value)(items)


def _map_mapping(value: MutableMapping[Any, Any], change: Callable[[torch.Tensor], Any]) -> Any:
    changed = {key: map_tensors(item, change) for key, item in value.items()}
    if type(value) is dict:
        return changed
    twin = copy.copy(value)  # keeps the class, its defaults and its attributes
    for key, item in changed.items():
        twin[key] = item
    return twin


def _map_dataclass(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    twin = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(twin, field.name, map_tensors(getattr(value, field.name), change))
    return twin


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside ``value``, in the order in which `map_tensors` visits them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def plain_leaves(value: Any) -> list[str]:
    """Return a printable form of everything in ``value`` that is no tensor, to tell whether two ranks' calls agree."""
    if isinstance(value, torch.Tensor):
        return []
    if isinstance(value, Mapping):
        return [f"{key}={leaf}" for key, item in value.items() for leaf in (plain_leaves(item) or ["-"])]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in (plain_leaves(item) or ["-"])]
    if isinstance(value, str | int | float | bool | None | torch.dtype | torch.device):
        return [repr(value)]
    return [type(value).__qualname__]


def nbytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes that the tensors' elements take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy without history that asks for a gradient where ``tensor`` did: a captured input, or its reuse."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
