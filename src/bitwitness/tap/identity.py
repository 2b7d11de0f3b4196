"""Which tensors hold the same content: by their storage, its version, and the part of it that they show.

Storages are held weakly, so that nothing is kept alive; a weak reference also keeps torch from giving the storage's
identity to another, so that a content is never taken for one that was freed.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
from typing import Any

import torch

from bitwitness.stats.local import is_torchs_own, local_values
from bitwitness.tap.compat import enable_grad, is_traceable_wrapper_subclass, uncast, undispatched
from bitwitness.tap.storages import StorageRef

Look = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
"""A tensor's version, offset, shape, strides and type."""


def spans_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether elements lie in memory without gaps and overlaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Identities:
    """Tells contents apart; a view with its elements in another order (a transpose) is the same content."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageRef] = {}

    def storage(self, tensor: torch.Tensor) -> int:
        """Return the identity of the memory that a plain tensor lies in."""
        storage = tensor.untyped_storage()
        number = int(storage._cdata)
        if number not in self._storages:
            self._storages[number] = StorageRef(storage)
        return number

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return a plain tensor's storage, and where in it the tensor begins."""
        return self.storage(tensor), int(tensor.storage_offset())

    def key(self, tensor: torch.Tensor, ahead: int = 0) -> tuple[int, Hashable]:
        """Return a plain tensor's storage, and what its content is known by, until `forget`.

        ``ahead``: versions that torch is about to count, of an operator in place that it has not seen return.
        """
        storage = self.storage(tensor)
        return storage, _content(storage, _look(tensor), tensor, ahead)

    def look(self, tensor: torch.Tensor) -> tuple[int, Look | None]:
        """Return a tensor's storage, and all that its values and their order are known by, until `forget`.

        None, and no storage, of a tensor that is not read as it lies there: a wrapper's, a sparse or a lazily negated one.
        """
        if not is_torchs_own(tensor) or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_complex():
            return 0, None
        return int(tensor.untyped_storage()._cdata), _look(tensor)

    def key_of_look(self, tensor: torch.Tensor, look: Look) -> Hashable:
        """Return what the content of a tensor is known by that `look` was taken of."""
        return _content(self.storage(tensor), look, tensor)

    def forget(self) -> None:
        """Forget all storages, and with them all keys."""
        self._storages.clear()


def _look(tensor: torch.Tensor) -> Look:
    version = -1 if tensor.is_inference() else tensor._version
    return version, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


def _content(storage: int, look: Look, tensor: torch.Tensor, ahead: int = 0) -> Hashable:
    """Return the same for all views of the same values; see `Identities.key`."""
    version, offset, shape, strides, dtype = look
    version += ahead if version >= 0 else 0  # inference tensors have none
    if tensor.is_contiguous() or spans_memory(shape, strides):
        return storage, version, offset, tensor.numel(), dtype
    return storage, version, offset, shape, strides, dtype


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's local, dense values: what is measured.

    Not detached: beneath autograd, where dispatch modes run, that would give it another version counter.
    """
    wrapper: Any = tensor
    while not is_torchs_own(wrapper) and is_traceable_wrapper_subclass(wrapper):
        wrapper = _inner(wrapper)
    tensor = wrapper
    if not is_torchs_own(tensor) or tensor.layout is not torch.strided or tensor.dtype.is_complex:
        return local_values(tensor)
    return local_values(tensor) if tensor.is_meta or tensor.is_neg() or tensor.is_quantized else tensor


def _inner(tensor: Any) -> torch.Tensor:
    """Return what a tensor that wraps others holds: a DTensor's shard, what a collective on its way will deliver."""
    found: torch.Tensor
    if hasattr(type(tensor), "trigger_wait"):
        found = tensor.trigger_wait()
    elif hasattr(type(tensor), "to_local"):
        found = tensor._local_tensor  # to_local() would be an operator of its own, with a gradient
    else:
        names, _ = tensor.__tensor_flatten__()
        found = getattr(tensor, names[0])
    return found


def in_memory_order(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as they lie in memory, one dimension; in their own order where there are gaps between them."""
    if not values.is_contiguous() and spans_memory(values.shape, values.stride()):
        return values.as_strided((values.numel(),), (1,), values.storage_offset())
    return values.reshape(-1)


def layout_of(values: torch.Tensor) -> str | None:
    """Return the strides of a tensor that lies in memory in another order than its own; None for all others."""
    if values.is_contiguous() or not spans_memory(values.shape, values.stride()):
        return None
    return ",".join(map(str, values.stride()))


class unseen:  # noqa: N801 - a context manager by its use; a class, for one of a generator costs four times as much
    """A context for measuring: no dispatch mode sees what runs, no graph is made, no autocast narrows it.

    Autocast would: on CUDA it has matrices multiplied with vectors in a half type.
    """

    __slots__ = ("_cast", "_dispatch", "_graph")

    def __enter__(self) -> None:
        self._dispatch, self._cast, self._graph = undispatched(), uncast(), torch.is_grad_enabled()
        self._dispatch.__enter__()
        self._cast.__enter__()
        enable_grad(False)  # noqa: FBT003

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        enable_grad(self._graph)
        self._cast.__exit__(kind, error, trace)
        self._dispatch.__exit__(kind, error, trace)
