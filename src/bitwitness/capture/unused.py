"""Losses that a script computed and did not use: many scripts skip a step that is not finite by themselves, and tell nobody."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bitwitness.capture.step import ForwardRecord

_MOST = 1000  # losses that are kept; where nobody asks for so long, their device is waited for once


class UnusedLosses:
    """Keeps them until somebody asks which were not finite: to ask at once would have each step wait for its device."""

    def __init__(self) -> None:
        self._bad: list[tuple[int, float]] = []
        self._pending: list[tuple[int, torch.Tensor, ForwardRecord]] = []
        self._kept: list[tuple[int, torch.Tensor]] = []

    def may_be(self, step: int, loss: torch.Tensor, of: ForwardRecord) -> None:
        """Note a loss that the next forward has come before the backward of; that may come yet, until `step_ended`."""
        self._pending.append((step, loss.detach(), of))

    def step_ended(self) -> None:
        """Keep, of those noted, what was not backpropagated."""
        pending, self._pending = self._pending, []
        for step, loss, of in pending:
            if not of.backpropagated:
                self.add(step, [loss])

    def add(self, step: int, losses: Sequence[torch.Tensor]) -> None:
        """Keep losses whose gradients were let go."""
        self._kept += [(step, loss) for loss in losses]
        if len(self._kept) >= _MOST:
            self._ask()

    def not_finite(self) -> list[tuple[int, float]]:
        """Return steps and values of those that are not finite, and forget all; waits for their device."""
        self.step_ended()
        self._ask()
        bad, self._bad = self._bad, []
        return bad

    def _ask(self) -> None:
        kept, self._kept = self._kept, []
        values = torch.stack([loss.float().reshape(()) for _, loss in kept]).tolist() if kept else []
        self._bad += [(step, value) for (step, _), value in zip(kept, values, strict=True) if not math.isfinite(value)]
