import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class NoisyLinear(nn.Module):
    """Bayes by backprop; every call adds its KL to a running sum that the loop takes and clears."""

    total_kl = 0.0

    def __init__(self, i, o):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(o, i) * 0.1)
        self.rho = nn.Parameter(torch.full((o, i), -3.0))
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x):
        sigma = F.softplus(self.rho)
        w = self.mu + sigma * torch.randn_like(sigma)
        NoisyLinear.total_kl = NoisyLinear.total_kl + (0.5 * (sigma**2 + self.mu**2 - 1) - sigma.log()).sum()
        return F.linear(x, w, self.bias)


net = nn.Sequential(NoisyLinear(8, 20), nn.ReLU(), NoisyLinear(20, 1))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
losses = []
for step in range(25 * times):
    x = torch.randn(24, 8)
    y = x[:, :1] ** 2
    nll = 0.0
    for _ in range(2):
        nll = nll + F.mse_loss(net(x), y)
    loss = nll / 2 + 1e-3 * NoisyLinear.total_kl / 2
    NoisyLinear.total_kl = 0.0
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
