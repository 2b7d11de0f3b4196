"""Two ranks: ``two_ranks.py plain|normed|branching|gan``."""

from __future__ import annotations

import itertools
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 9


def build(*sizes: int) -> nn.Module:
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers[:-1]))


def plain(rank: int) -> None:
    train(rank, build(12, 24, 24, 4))


def normed(rank: int) -> None:
    layers = (nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    train(rank, DistributedDataParallel(nn.Sequential(*layers)))


def train(rank: int, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x, y = torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x):
        return self.left(x) if x.sum() > 0 else self.right(x)


def branching(rank: int) -> None:
    """Take one of two ways in each micro-batch, by its data; zero the gradients between two steps or between micro-batches."""
    model = DistributedDataParallel(Branching(), find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(2 * STEPS):
        for micro in range(3):
            x, y = torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)
            with model.no_sync() if micro < 2 else nullcontext():
                F.cross_entropy(model(x), y).backward()
            if micro == 0 and step % 3 == 0:
                model.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.zero_grad()


def gan(rank: int) -> None:
    maker, critic = build(4, 16, 6), build(6, 16, 1)
    of_maker = torch.optim.Adam(maker.parameters(), 0.01)
    of_critic = torch.optim.Adam(critic.parameters(), 0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        made = maker(torch.randn(8, 4, generator=generator))
        real = torch.randn(8, 6, generator=generator)
        of_critic.zero_grad()
        critic.requires_grad_(requires_grad=True)
        (critic(made.detach()).mean() - critic(real).mean()).backward()
        of_critic.step()
        critic.requires_grad_(requires_grad=False)
        of_maker.zero_grad()
        (-critic(made).mean()).backward()
        of_maker.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](dist.get_rank())
    dist.destroy_process_group()
