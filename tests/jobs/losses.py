"""Losses outside the model under DistributedDataParallel, with faults in them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from trials import Training, Trial, both, drawn, main


class Net(nn.Module):
    """Leaves an auxiliary loss in an attribute, where the script finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 6)
        self.aux = None

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        self.aux = hidden.softmax(-1).mean(0).square().sum()
        return self.second(hidden)


def trained(term):
    def build() -> Training:
        net, x = Net(), drawn(6, 8)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(_index: int) -> None:
            scores = model(x())
            loss = F.cross_entropy(scores, torch.arange(6)) + term(net)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return Training(model, optimizer, step)

    return build


def penalty(net):
    return 0.01 * sum(p.abs().sum() for p in net.parameters())


def auxiliary(net):
    return 0.1 * net.aux.sqrt()


TRIALS = {
    "cross entropy": Trial(trained(lambda _: 0.0), faults=both("./_log_softmax:forward")),
    "cross entropy, backward": Trial(trained(lambda _: 0.0), faults=both("./_log_softmax_backward_data:backward")),
    "penalty": Trial(trained(penalty), faults=both("./sgn:backward", pattern="all")),
    "auxiliary loss": Trial(trained(auxiliary), faults=both("./sqrt:forward", pattern="all", element=0, factor=1e-4)),
}

if __name__ == "__main__":
    main(TRIALS)
