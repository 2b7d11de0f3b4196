"""A training as small as can be, with BatchNorm's buffers and dropout's draws, which tests run step by step."""

from __future__ import annotations

import torch
from torch import nn


class Training:
    """A net, its optimizer and its batches; ``spoil`` makes a loss NaN."""

    def __init__(self, optimizer: str = "SGD") -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 2))
        self.optimizer = getattr(torch.optim, optimizer)(self.net.parameters(), lr=0.1)
        self.batches = torch.Generator().manual_seed(1)
        self.spoil = False

    def loss(self) -> torch.Tensor:
        torch.manual_seed(self.batches.initial_seed())  # for the dropout
        loss = self.net(torch.randn(4, 6, generator=self.batches)).square().mean()
        return loss * float("nan") if self.spoil else loss

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def evaluate(self, *, grad: bool) -> None:
        """Run a forward in evaluation mode, between steps."""
        self.net.eval()
        with torch.set_grad_enabled(grad):
            self.net(torch.ones(4, 6))
        self.net.train()

    def bits(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.net.state_dict().values()]
