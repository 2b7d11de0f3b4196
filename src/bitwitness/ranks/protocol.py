"""What the guard asks of the other ranks, however these are reached."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from bitwitness.liveness import Liveness


class Ranks(Protocol):
    """What the guard asks of the other ranks. All methods but the properties are collective."""

    @property
    def rank(self) -> int:
        """Number of the rank that asks, within the group."""

    @property
    def in_job(self) -> int:
        """Its number within the whole job, as messages tell it."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def members(self) -> tuple[int, ...]:
        """Their numbers in the whole job; empty for a process that is asked alone."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over the ranks."""

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over the ranks."""

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``row``, stacked by rank."""

    def shift(self, tensors: Sequence[torch.Tensor], by: int) -> list[torch.Tensor]:
        """Send ``tensors`` to the rank ``by`` further on and return those of the rank ``by`` before."""

    def swap(self, tensors: Sequence[torch.Tensor], other: int) -> list[torch.Tensor]:
        """Send ``tensors`` to one rank and return those it sends; only the two take part."""

    def broadcast_text(self, text: str, source: int) -> str:
        """Return the text that rank ``source`` gave, on every rank."""

    def gather_text(self, text: str) -> list[str]:
        """Return every rank's text, by rank. For short texts: each rank receives all of them."""

    def together(self) -> AbstractContextManager[None]:
        """Have the short deadline count: all ranks are known to be in this block."""

    def expect(self, seconds: float) -> None:
        """Make the short deadline longer, if need be, for work of ``seconds``; to be called with the same value by all."""

    def check_liveness(self, *, final: bool = True) -> Liveness:
        """Return who does not answer, after an exchange broke (``final``) or in passing; not collective."""

    def barrier(self, seconds: float) -> None:
        """Wait for all ranks, at most ``seconds``."""

    def close(self) -> None:
        """Give the channel up."""
