import os
import random

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
torch.manual_seed(SEED)


class StochasticDepth(nn.Module):
    def __init__(self, depth=5, width=16, p=0.3):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)
        )
        self.p = p
        self.rng = random.Random(SEED + 1)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.rng.random() < self.p:
                continue
            x = x + layer(x)
        return self.head(x)


net = StochasticDepth()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
losses = []
for step in range(25 * times):
    x = torch.randn(16, 16)
    loss = F.cross_entropy(net(x), x[:, :4].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, net.rng.random()))
