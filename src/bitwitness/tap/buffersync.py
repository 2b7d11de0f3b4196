"""The broadcast of buffers with which DistributedDataParallel begins a forward, before it calls the model inside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bitwitness.tap.ownwork import in_own_work, in_replay
from bitwitness.tap.patching import replaced

Around = Callable[[Any, list[Tensor], int], AbstractContextManager[None]]


class BufferSync:
    """Runs the broadcasts of one wrapper's training forwards inside something, until `close`.

    Parameters
    ----------
    wrapper
        Whose buffers these are.
    around
        Called with the process group, the buffers and the place in the group of the rank that sends; returns what the
        broadcast runs inside. Not called for evaluations, nor where the script has a communication hook for buffers.

    """

    def __init__(self, wrapper: DistributedDataParallel, around: Around) -> None:
        self._wrapper: DistributedDataParallel | None = wrapper
        self._around = around
        self._stack = ExitStack()
        # No step of it travels through Python but this one, which its forward alone calls.
        self._stack.enter_context(replaced(DistributedDataParallel, "_distributed_broadcast_coalesced", self._wrap))

    def close(self) -> None:
        """Run them as they come."""
        self._wrapper = None
        self._stack.close()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def broadcast(
            wrapper: DistributedDataParallel, tensors: Any, buffer_size: int, authoritative_rank: int = 0
        ) -> Any:
            ours = wrapper is self._wrapper and wrapper.training and not in_own_work() and not in_replay()
            around = self._around(wrapper.process_group, list(tensors), authoritative_rank) if ours else nullcontext()
            with around:
                return original(wrapper, tensors, buffer_size, authoritative_rank)

        return broadcast
