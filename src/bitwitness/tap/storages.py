"""Weak references to the memory of tensors."""

from __future__ import annotations

from functools import partial
from operator import attrgetter

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bitwitness.tap.compat import free_storage_ref


class StorageRef(StorageWeakRef):
    """torch's weak reference to a storage, which is let go of without a line of Python being run.

    torch's own has a ``__del__`` written in Python. An interrupt (Ctrl-C) that arrives there is printed and lost, and hundreds
    of references are let go in each step: the training would go on. What is called here instead is C throughout.
    """

    __slots__ = ("_let_go",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)  # type: ignore[no-untyped-call]
        self._let_go = partial(free_storage_ref, self.cdata)

    __del__ = property(attrgetter("_let_go"))  # found on the class, bound to the object, called
