"""Tensors inside the nested arguments and results of a module: walked, replaced, counted.

Wider than ``torch.utils._pytree`` on purpose: a module may return a dataclass that nobody registered, and a tensor that
is overlooked there would make the guard blind without a word.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

_DEPTH = 5  # objects within objects in which a model's results are looked for
_MOST = 10_000  # objects that are looked into: a result has a few, a graph of the script's objects may have no end
PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, torch.Size, slice, range)
"""What holds nothing else, and is the same if it is equal."""


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


def tensors_within(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside ``value``, also those in the attributes of objects that `map_tensors` does not know."""
    found: list[torch.Tensor] = []
    _search(value, found, set(), 0)
    return found


def differentiable(values: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of those of a forward's tensors that a backward may begin at."""
    return [position for position, tensor in enumerate(values) if tensor.requires_grad and not tensor.is_leaf]


def _search(value: Any, found: list[torch.Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    if isinstance(value, str | bytes | int | float | complex | type | torch.nn.Module | None) or id(value) in seen:
        return
    seen.add(id(value))
    if depth > _DEPTH or len(seen) > _MOST or callable(value):
        return
    if isinstance(value, Mapping):
        items: list[Any] = list(value.values())
    elif isinstance(value, tuple | list):
        items = list(value)
    else:
        items = list(getattr(value, "__dict__", {}).values())
    for item in items:
        _search(item, found, seen, depth + 1)


def objects_in(value: Any) -> list[Any]:
    """Return what in ``value`` is neither a tensor, nor plain, nor a container that `map_tensors` copies: caches, say."""
    if isinstance(value, (torch.Tensor, *PLAIN)) or callable(value):
        return []
    if isinstance(value, Mapping):
        return [one for item in value.values() for one in objects_in(item)]
    if isinstance(value, tuple | list):
        return [one for item in value for one in objects_in(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [one for field in dataclasses.fields(value) for one in objects_in(getattr(value, field.name, None))]
    return [value]


def plain_leaves(value: Any) -> list[str]:
    """Return a printable form of everything in ``value`` that is no tensor, to tell whether two ranks' calls agree."""
    if isinstance(value, torch.Tensor):
        return []
    if isinstance(value, Mapping):
        return [f"{key}={leaf}" for key, item in value.items() for leaf in (plain_leaves(item) or ["-"])]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in (plain_leaves(item) or ["-"])]
    if isinstance(value, str | int | float | bool | None | torch.dtype | torch.device | slice):
        return [repr(value)]
    return [type(value).__qualname__]


def nbytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes that the tensors' elements take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy without history that asks for a gradient where ``tensor`` did: a captured input, or its reuse.

    It is of the same class, with the same attributes.
    """
    copied = tensor.detach().clone()
    if type(copied) is not type(tensor) and not isinstance(tensor, torch.nn.Parameter):
        copied = copied.as_subclass(type(tensor))
        vars(copied).update(vars(tensor))
    return copied.requires_grad_(tensor.requires_grad)
