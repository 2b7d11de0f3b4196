"""Ranks that hold half of the hidden features each, and add them up in the model by an eager collective; run by forked()."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import bitwitness as bw


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Halves(nn.Module):
    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, 6), nn.Linear(6, 8, bias=False), nn.Linear(8, 2)
        self.bias, self.twice = nn.Parameter(torch.randn(8)), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(F.gelu(self.up(x)))
        h = Reduce.apply(h + self.bias) if self.twice else Reduce.apply(h) + self.bias
        return self.out(h + x)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    for name in ("once", "twice"):
        torch.manual_seed(dist.get_rank())
        model = Halves(twice=name == "twice")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(9)
        with bw.Recorder(model, out=f"{folder}/{name}", content="tensors"):
            for _ in range(2):
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
