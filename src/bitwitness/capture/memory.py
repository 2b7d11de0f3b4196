"""The memory of what a forward returned, for as long as anything still uses it: a detached hidden state, a logged loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bitwitness.stats import bit_hash
from bitwitness.tap.compat import storage_of
from bitwitness.tap.storages import StorageRef


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a tensor lies, and its bit hash (int64, 0-d) as it was.

    The tensor itself may be gone while what was detached from it lives on, so it is the storage that is asked.
    """

    digest: torch.Tensor
    _storage: StorageRef
    _dtype: torch.dtype
    _shape: torch.Size
    _stride: tuple[int, ...]
    _offset: int | torch.SymInt

    @classmethod
    def of(cls, tensor: torch.Tensor, digest: torch.Tensor) -> Memory | None:
        """Return a tensor's memory; None for those that are more than strided memory (sparse, sharded, conjugated)."""
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
        storage = StorageRef(tensor.untyped_storage())
        return cls(digest, storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def tensor(self) -> torch.Tensor | None:
        """Return a tensor in this memory, with a version counter of its own; None if nothing uses it any more."""
        storage = storage_of(self._storage.cdata)
        if storage is None:
            return None
        made = torch.empty(0, dtype=self._dtype, device=storage.device)
        return made.set_(storage, self._offset, self._shape, self._stride)

    def mend(self, value: torch.Tensor) -> None:
        """Write a value, unless the memory has been changed since, or holds that value already."""
        now = self.tensor()
        if now is None or now.shape != value.shape or now.dtype != value.dtype:
            return
        with torch.no_grad():
            if bool(bit_hash(now) == self.digest) and not bool(bit_hash(value) == self.digest):
                now.copy_(value)


def still_used(memories: Sequence[Memory | None], values: Sequence[torch.Tensor]) -> list[tuple[Memory, torch.Tensor]]:
    """Return, of what a repeated forward returned, what stands for memory that is still used; in pairs."""
    pairs = zip(memories, values, strict=False) if len(memories) == len(values) else ()
    return [(memory, value.detach()) for memory, value in pairs if memory is not None and memory.tensor() is not None]
