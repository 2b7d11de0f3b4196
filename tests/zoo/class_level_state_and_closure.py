import itertools
import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


STATS = {"calls": 0, "norms": []}
ticker = itertools.count()


def make_gate(width):
    scale = [1.0]

    def gate(x):
        scale[0] *= 0.99  # kept in a closure
        STATS["calls"] += 1
        STATS["norms"].append(x.detach().norm().item())
        return x * scale[0]

    return gate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 2)
        self.gate = make_gate(16)

    def forward(self, x):
        h = self.gate(self.a(x).relu())
        if next(ticker) % 3 == 0:  # every third call sees a bit more
            h = h + 0.1
        return self.b(h)


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
losses = []
for _ in range(25 * times):
    x = torch.randn(16, 8)
    loss = F.cross_entropy(net(x), (x[:, 0] > x[:, 1]).long())
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, STATS["calls"], STATS["norms"], next(ticker)))
