import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Coupling(nn.Module):
    def __init__(self, d, flip):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d // 2, 24), nn.Tanh(), nn.Linear(24, d))
        self.flip = flip

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], 1), s.sum(1)


class Flow(nn.Module):
    def __init__(self, d=4, n=4):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(d, i % 2 == 1) for i in range(n))
        self.base = torch.distributions.MultivariateNormal(torch.zeros(d), torch.eye(d))

    def log_prob(self, x):
        total = 0
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return self.base.log_prob(x) + total


flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=2e-3)
losses = []
for _ in range(22 * times):
    z = torch.randn(64, 4)
    x = torch.cat([z[:, :2], z[:, 2:] * 0.3 + z[:, :2] ** 2], 1)
    loss = -flow.log_prob(x).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(flow, opt, losses))
