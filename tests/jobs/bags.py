"""Trains bags of sparse embeddings with offsets, on one rank or several that share the batch out: ``bags.py RUN``."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import bitwitness as bw


class Tower(nn.Module):
    """Two tables, and what is made of their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(40, 8, mode="sum", sparse=True) for _ in range(2))
        self.top = nn.Linear(16, 1)

    def forward(self, ids: list[torch.Tensor], offsets: list[torch.Tensor]) -> torch.Tensor:
        return self.top(torch.cat([bag(i, o) for bag, i, o in zip(self.bags, ids, offsets, strict=True)], 1))


def packed(bags: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([0] + [len(bag) for bag in bags[:-1]])
    return torch.cat(bags), lengths.cumsum(0)


def main(out: str) -> None:
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    model: nn.Module = Tower()
    if world > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out, content="tensors"):
        for _ in range(2):
            tables = [[torch.randint(0, 40, (1 + n % 4,), generator=generator) for n in range(12)] for _ in range(2)]
            target = torch.randn(12, 1, generator=generator)
            mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
            ids, offsets = zip(*(packed(bags[mine]) for bags in tables), strict=True)
            (model(list(ids), list(offsets)) - target[mine]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
