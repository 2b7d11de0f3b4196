"""Which tensors hold the same content: by their storage, its version, and the part of it that they show.

Storages are held weakly, so that nothing is kept alive; a weak reference also keeps torch from giving the storage's
identity to another, so that a content is never taken for one that was freed.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bitwitness.stats.local import local_values


def spans_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether elements lie in memory without gaps and overlaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Identities:
    """Tells contents apart.

    Parameters
    ----------
    ordered
        Views with another order of the same elements are another content.

    """

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._storages: dict[int, StorageWeakRef] = {}

    def storage(self, tensor: torch.Tensor) -> int:
        """Return the identity of the memory that a plain tensor lies in."""
        storage = tensor.untyped_storage()
        number = int(storage._cdata)
        if number not in self._storages:
            self._storages[number] = StorageWeakRef(storage)
        return number

    def key(self, tensor: torch.Tensor) -> Hashable:
        """Return what the content of a plain tensor is known by, until `forget`."""
        version = -1 if tensor.is_inference() else tensor._version
        offset, dtype = tensor.storage_offset(), tensor.dtype
        shape, strides = tensor.shape, tensor.stride()
        if tensor.is_contiguous() or (not self._ordered and spans_memory(shape, strides)):
            return self.storage(tensor), version, offset, tensor.numel(), dtype
        return self.storage(tensor), version, offset, shape, strides, dtype

    def forget(self) -> None:
        """Forget all storages, and with them all keys."""
        self._storages.clear()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's local, dense values without its history: what is measured."""
    return local_values(tensor.detach())
