"""What a product's check read of a gradient, kept for those that read the same gradient next.

The backward of a linear layer reads ``dY`` three times, for ``dX = dY W``, ``dW = dY^T X`` and ``db = 1^T dY``. With ``dY s``
and its rows' norms, which the first check takes in the pass that it needs anyway, the other two need not read it again:
``dW^T s = X^T (dY s)`` and ``db s = 1^T (dY s)``.

One reading is kept, until the next takes its place. It holds for the same numbers in the same memory: who wrote over them has
changed their version, and memory that was given back is known by its reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bitwitness.tap.storages import StorageRef


class RowReading(NamedTuple):
    """``x s`` and upper bounds of the norms of x's rows, ``[M]`` each."""

    sums: Tensor
    norms: Tensor


class LastReading:
    """Keeps one reading; `of` gives it for the same matrix, None for any other."""

    def __init__(self) -> None:
        self._storage: StorageRef | None = None
        self._as: tuple[object, ...] = ()
        self._found: RowReading | None = None

    def keep(self, x: Tensor, found: RowReading) -> None:
        """Keep what was read of a strided matrix ``[M, K]``, with the signs that `Signs` gives for K."""
        if not x.is_inference():  # whose versions are not counted
            self._storage, self._as, self._found = StorageRef(x.untyped_storage()), _description(x), found

    def of(self, x: Tensor) -> RowReading | None:
        """Return what was read, where x is the matrix of which it was read, unchanged."""
        if self._storage is None or x.layout is not torch.strided or x.is_inference():
            return None
        same = self._storage.cdata == x.untyped_storage()._cdata and self._as == _description(x)
        return self._found if same else None


def _description(x: Tensor) -> tuple[object, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x._version
