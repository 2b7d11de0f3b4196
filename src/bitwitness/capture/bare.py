"""What a container holds, without a call of its class's own code: a lazy mapping's values may all have to be imported."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

_READERS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any], int]], ...] = (
    (dict, dict.values, dict.__len__),
    (list, list.__iter__, list.__len__),
    (tuple, tuple.__iter__, tuple.__len__),
    (set, set.__iter__, set.__len__),
    (frozenset, frozenset.__iter__, frozenset.__len__),
    (deque, deque.__iter__, deque.__len__),
)
CONTAINERS = tuple(kind for kind, _, _ in _READERS)
"""Python's own containers; those of scripts and libraries are often made from them."""


def values_of(container: Any) -> list[Any]:
    """Return what one of Python's containers holds, of a mapping its values."""
    return next(list(read(container)) for kind, read, _ in _READERS if isinstance(container, kind))


def size_of(container: Any) -> int:
    """Return how many things one of Python's containers holds."""
    return next(size(container) for kind, _, size in _READERS if isinstance(container, kind))


class Items:
    """What a list, a set or a deque holds; iterates over it as it is at the time."""

    __slots__ = ("container",)

    def __init__(self, container: Any) -> None:
        self.container = container

    def __iter__(self) -> Iterator[Any]:
        return iter(values_of(self.container))
