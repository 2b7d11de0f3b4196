"""Gradients and outputs in memory that every run of the same code writes to, as CUDA graphs have it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trials import Training, Trial, drawn, main, size


class Memory:
    """What a graph's pool is: nothing that a look at attributes and containers finds."""

    __slots__ = ("grad", "output")

    def __init__(self, *, output: bool) -> None:
        self.output = torch.zeros(6, 4) if output else None
        self.grad = None if output else torch.zeros(4, 16)


class StaticLinear(torch.autograd.Function):
    """A linear layer that computes into the same memory each time; what of it is static is chosen by the module."""

    @staticmethod
    def forward(ctx, x, weight, memory):
        ctx.save_for_backward(x, weight)
        ctx.memory = memory
        result = x @ weight.T
        if memory.output is not None:
            return memory.output.copy_(result).detach()
        return result

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ours = grad.T @ x
        if ctx.memory.grad is not None:
            ours = ctx.memory.grad.copy_(ours).detach()
        return grad @ weight, ours, None


class StaticNet(nn.Module):
    def __init__(self, *, output: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.randn(4, 16) * 0.2)
        self.memory = Memory(output=output)

    def forward(self, x):
        return StaticLinear.apply(torch.relu(self.first(x)), self.weight, self.memory)


def static(*, output: bool, wrapped: bool = True):
    def build() -> Training:
        net, x = StaticNet(output=output), drawn(6, 8)
        model = DistributedDataParallel(net) if wrapped and size() > 1 else net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(_index: int) -> None:
            model(x()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return Training(model, optimizer, step)

    return build


TRIALS = {
    "static gradients, alone": Trial(static(output=False, wrapped=False)),
    "static outputs, alone": Trial(static(output=True, wrapped=False)),
    "static gradients": Trial(static(output=False)),
    "static outputs": Trial(static(output=True)),
}

if __name__ == "__main__":
    main(TRIALS)
