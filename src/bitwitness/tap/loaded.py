"""Which samples a batch is made of, where a DataLoader of torch's handed it out: known again by its bits."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import dataloader

from bitwitness.stats import bit_hash, in_hex
from bitwitness.tap.ownwork import own_work
from bitwitness.tap.patching import replaced
from bitwitness.tap.slots import named_tensors

_KEPT = 256  # tensors of batches that are known: loaders hand out some ahead of the step that reads them
_HASHED = 1 << 24  # elements of one that is hashed


class LoadedBatches:
    """Notes the indices of each batch that a DataLoader of this process hands out, while attached.

    A loader with workers asks for indices ahead of its batches, which come in their order; Trainer and accelerate fetch a batch
    ahead of the step that reads it and copy it to a device: what tells them apart is a hash of each tensor's bits.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._asked: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def attach(self) -> None:
        """Look on from now on; where torch is otherwise inside, nothing is known."""
        kind: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
        if kind is None or not all(hasattr(kind, name) for name in ("_next_index", "_reset", "__next__")):
            return
        self._stack.enter_context(replaced(kind, "_next_index", self._asking))
        self._stack.enter_context(replaced(kind, "_reset", self._resetting))
        self._stack.enter_context(replaced(kind, "__next__", self._handing_out))

    def detach(self) -> None:
        """Look no more."""
        self._stack.close()

    def indices(self, hashes: Sequence[str]) -> tuple[int, ...]:
        """Return the indices of the batch that one of some tensors is of, by their hashes (16 hexadecimal digits)."""
        return next((self._known[one] for one in hashes if one in self._known), ())

    # -- what is replaced ----------------------------------------------------------------------------------------

    def _asking(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def next_index(iterator: Any) -> Any:
            found = original(iterator)
            self._asked.setdefault(iterator, deque()).append(found)
            return found

        return next_index

    def _resetting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            self._asked.pop(iterator, None)  # an epoch that was left early: what was asked for does not come
            return original(iterator, *args, **kwargs)

        return reset

    def _handing_out(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def next_batch(iterator: Any) -> Any:
            data = original(iterator)
            with suppress(Exception):  # the training's data matter, ours do not
                asked = self._asked.get(iterator)
                self._note(asked.popleft() if asked else None, data)
            return data

        return next_batch

    def _note(self, asked: Any, data: Any) -> None:
        indices = asked if isinstance(asked, list | tuple) else [asked]
        if not indices or not all(isinstance(index, int) for index in indices):
            return
        with own_work(), torch.no_grad():
            for _, tensor in named_tensors(data, "batch"):
                if tensor.device.type == "cpu" and 0 < tensor.numel() <= _HASHED:
                    self._known[in_hex(bit_hash(tensor))] = tuple(indices)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
