"""What is known of tensors for as long as they live, by the tensors themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

V = TypeVar("V")


class WeakTensorMap(Generic[V]):
    """Values by tensors, which are told apart by being the same object; for the calls of a step, and then dropped.

    Unlike torch's own there is no callback where a tensor dies: it would be a line of Python at a place where an interrupt
    (Ctrl-C) is printed and lost, so that the training went on. What is dead stays in the map, and is never found.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], V]] = {}

    def __setitem__(self, tensor: torch.Tensor, value: V) -> None:
        self._entries[id(tensor)] = weakref.ref(tensor), value

    def get(self, tensor: torch.Tensor) -> V | None:
        """Return what is known of a tensor, if anything is."""
        entry = self._entries.get(id(tensor))  # of a dead one, if its number was given to another
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def items(self) -> Iterator[tuple[torch.Tensor, V]]:
        """Yield those that live."""
        for reference, value in list(self._entries.values()):
            if (tensor := reference()) is not None:
                yield tensor, value
