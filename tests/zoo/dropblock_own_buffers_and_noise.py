import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class NoisyNorm(nn.Module):
    """Batch renormalisation-like: running statistics as plain attributes, noise from the global generator."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.running = torch.zeros(d)  # forgot register_buffer
        self.steps = torch.tensor(0)

    def forward(self, x):
        if self.training:
            self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
            self.steps += 1
            x = x + torch.normal(0.0, 0.1 / float(self.steps) ** 0.5, x.shape)
        return (x - self.running) * self.weight


net = nn.Sequential(nn.Linear(9, 18), NoisyNorm(18), nn.ReLU(), nn.AlphaDropout(0.1), nn.Linear(18, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for _ in range(25 * times):
    x = torch.randn(16, 9)
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, net[1].running, net[1].steps, opt, losses))
