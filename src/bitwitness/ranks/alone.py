"""A process that trains alone: it answers all that is asked of the other ranks itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from bitwitness.liveness import Liveness


class Alone:
    """One rank: every collective is the identity. ``in_job`` is its number in a job that trains something else together."""

    rank = 0
    size = 1
    members: tuple[int, ...] = ()

    def __init__(self, in_job: int = 0) -> None:
        self.in_job = in_job

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        return values

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the one row."""
        return row.unsqueeze(0)

    def shift(self, tensors: Sequence[torch.Tensor], by: int) -> list[torch.Tensor]:
        """Return the tensors."""
        del by
        return list(tensors)

    def swap(self, tensors: Sequence[torch.Tensor], other: int) -> list[torch.Tensor]:
        """Return the tensors."""
        del other
        return list(tensors)

    def broadcast_text(self, text: str, source: int) -> str:
        """Return the text."""
        del source
        return text

    def gather_text(self, text: str) -> list[str]:
        """Return the one text."""
        return [text]

    def together(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def expect(self, seconds: float) -> None:
        """Do nothing."""
        del seconds

    def check_liveness(self, *, final: bool = True) -> Liveness:
        """Return none."""
        del final
        return Liveness()

    def barrier(self, seconds: float) -> None:
        """Return at once."""
        del seconds

    def close(self) -> None:
        """Do nothing."""
