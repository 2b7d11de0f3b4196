"""The ranks that write and read one checkpoint together, over a gloo group of their own: tensors only, with a deadline."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from bitwitness.errors import SideChannelError
from bitwitness.files.shown import shown
from bitwitness.ranks.channel import training_timeout

_REASON_KEPT = 200  # characters of gloo's own error, without its stack


class Together:
    """The ranks of a process group, or this process alone.

    What the ranks say goes through a gloo group beside the training's own: a save in the background never stands in the queue
    of its collectives. One save is under way at a time.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.group: dist.ProcessGroup | None = None
        self._limit = 0.0
        self.pending: Future[Any] | None = None
        if self.size > 1 and group is not None:
            self._limit = training_timeout(group)
            self.group = dist.new_group(
                dist.get_process_group_ranks(group),
                backend="gloo",
                timeout=timedelta(seconds=self._limit),
                use_local_synchronization=True,
            )

    def wait(self) -> None:
        """Wait for a save that is under way; whether it succeeded is for whoever holds its result."""
        if self.pending is not None:
            self.pending.exception()
            self.pending = None

    def worst(self, problem: str | None) -> str | None:
        """Return a problem of any rank, the lowest's that has one: the same on all. Collective."""
        if self.group is None:
            return problem
        who = torch.tensor([self.size if problem is None else self.rank])
        self._guarded(lambda: dist.all_reduce(who, op=dist.ReduceOp.MIN, group=self.group))
        first = int(who)
        if first == self.size:
            return None
        text = self._text(problem or "", first)
        return f"rank {first}: {text}"

    def numbers(self, mine: list[int]) -> list[int]:
        """Return the lowest rank's numbers, however many; collective."""
        if self.group is None:
            return mine
        count = torch.tensor([len(mine)])
        self._broadcast(count, 0)
        values = torch.tensor(mine) if self.rank == 0 else torch.zeros(int(count), dtype=torch.int64)
        if int(count):
            self._broadcast(values, 0)
        return [int(value) for value in values]

    def _text(self, text: str, source: int) -> str:
        words = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        count = torch.tensor([words.numel()])
        self._broadcast(count, source)
        if self.rank != source:
            words = torch.zeros(int(count), dtype=torch.uint8)
        self._broadcast(words, source)
        return bytes(words.numpy()).decode(errors="replace")

    def _broadcast(self, values: torch.Tensor, source: int) -> None:
        self._guarded(lambda: dist.broadcast(values, group=self.group, group_src=source))

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except RuntimeError as error:
            reason = shown(str(error).splitlines()[0], _REASON_KEPT)
            raise SideChannelError(
                f"rank {self.rank}: the ranks could not agree on a checkpoint within {self._limit:g} s: {reason}; what was "
                "saved before is untouched"
            ) from error


_KNOWN: WeakKeyDictionary[Any, Together] = WeakKeyDictionary()
"""By the training's group: a gloo group is made once, all ranks together, and connects every two of them."""


def together(group: dist.ProcessGroup | None = None) -> Together:
    """Return the ranks of a group, of the job by default; collective the first time.

    The same ones each time: they know of the save that is under way.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return _alone(os.getpid())
    own = dist.group.WORLD if group is None else group
    if own not in _KNOWN:
        _KNOWN[own] = Together(own)
    return _KNOWN[own]


@cache
def _alone(_process: int) -> Together:
    """Return a process by itself. One that was forked waits for no save of its parent's, whose thread it does not have."""
    return Together(None)
