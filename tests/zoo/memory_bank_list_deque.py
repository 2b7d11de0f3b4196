import os
from collections import deque

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class WithMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(12, 8)
        self.mix = nn.Linear(16, 3)
        self.bank = deque(maxlen=5)
        self.seen = []

    def forward(self, x):
        z = self.proj(x)
        context = torch.stack(list(self.bank)).mean(0) if self.bank else torch.zeros(8)
        self.bank.append(z.detach().mean(0))
        self.seen.append(float(z.detach().sum()))
        return self.mix(torch.cat([z, context.expand_as(z)], 1))


net = WithMemory()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
losses = []
for _ in range(25 * times):
    x = torch.randn(16, 12) + torch.randn(1)
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, list(net.bank), net.seen))
