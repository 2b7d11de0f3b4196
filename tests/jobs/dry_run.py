"""A script that runs its model once, to see shapes, and then has it trained by all ranks together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 2


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net(torch.ones(1, 4)).sum().backward()
    net.zero_grad()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapped(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
