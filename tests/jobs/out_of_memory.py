"""Trainings in which a replay on one rank runs out of memory."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trials import Training, Trial, drawn, main, rank


class Hungry(nn.Module):
    """Has no memory left when it is run a second time in one step, on one rank; ``late`` tells whether part of it has run."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.late = late

    def forward(self, x):
        if self.late:
            x = torch.relu(self.first(x))
        if rank() == 1 and _again():
            raise torch.OutOfMemoryError("no memory left, as this test has it")
        return self.second(x if self.late else torch.relu(self.first(x)))


def _again() -> bool:
    """Tell whether a replay runs us, by the calling code: a counter of our own would be put back."""
    frame = sys._getframe()
    while frame is not None:
        if "/replay/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def hungry(*, sharded: bool, late: bool = True):
    def build() -> Training:
        net, x = Hungry(late=late), drawn(6, 8)
        if sharded:
            fully_shard(net.first)
            fully_shard(net.second)
        model = fully_shard(net) if sharded else DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(_index: int) -> None:
            model(x()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return Training(model, optimizer, step)

    return build


TRIALS = {
    "out of memory, wrapped": Trial(hungry(sharded=False)),
    "out of memory, sharded": Trial(hungry(sharded=True)),
}

if __name__ == "__main__":
    main(TRIALS)
