"""What a container holds, without a call of its class's own code: a lazy mapping's values may all have to be imported.

Kinds are asked of the type alone: ``isinstance`` believes a proxy, which is no container to Python's own readers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

_READERS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any], int]], ...] = (
    (list, list.__iter__, list.__len__),
    (tuple, tuple.__iter__, tuple.__len__),
    (set, set.__iter__, set.__len__),
    (frozenset, frozenset.__iter__, frozenset.__len__),
    (deque, deque.__iter__, deque.__len__),
)
CONTAINERS = (dict, *(kind for kind, _, _ in _READERS))
"""Python's own containers; those of scripts and libraries are often made from them."""


def is_a(value: Any, *kinds: type) -> bool:
    """Tell whether a value really is of some kinds."""
    return issubclass(type(value), kinds)


def keys_of(mapping: Any) -> list[Any]:
    """Return a mapping's keys, of an ordered one in its own order."""
    return list(OrderedDict.__iter__(mapping) if is_a(mapping, OrderedDict) else dict.__iter__(mapping))


def items_of(mapping: Any) -> dict[Any, Any]:
    """Return what a mapping holds, as a plain one in the same order."""
    if type(mapping) is dict:
        return dict(mapping)
    return {key: dict.__getitem__(mapping, key) for key in keys_of(mapping)}


def values_of(container: Any) -> list[Any]:
    """Return what one of Python's containers holds, of a mapping its values."""
    if is_a(container, dict):
        return list(items_of(container).values())
    return next(list(read(container)) for kind, read, _ in _READERS if is_a(container, kind))


def size_of(container: Any) -> int:
    """Return how many things one of Python's containers holds."""
    if is_a(container, dict):
        return dict.__len__(container)
    return next(size(container) for kind, _, size in _READERS if is_a(container, kind))


class Items:
    """What a container holds; iterates over it as it is at the time."""

    __slots__ = ("container",)

    def __init__(self, container: Any) -> None:
        self.container = container

    def __iter__(self) -> Iterator[Any]:
        return iter(values_of(self.container))


class Keys:
    """A mapping's keys; iterates over them as they are at the time."""

    __slots__ = ("mapping",)

    def __init__(self, mapping: Any) -> None:
        self.mapping = mapping

    def __iter__(self) -> Iterator[Any]:
        return iter(keys_of(self.mapping))
