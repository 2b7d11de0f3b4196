import hashlib
import os

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def fingerprint(*things):
    h = hashlib.sha256()

    def eat(x):
        if isinstance(x, torch.Tensor):
            x = x.detach()
            x = x.to_dense() if x.is_sparse else x
            h.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, nn.Module):
            eat(list(x.parameters()))
            eat(list(x.buffers()))
        elif isinstance(x, torch.optim.Optimizer):
            eat(x.state_dict()["state"])
        elif isinstance(x, dict):
            for k in x:
                eat(x[k])
        elif isinstance(x, (list, tuple)):
            for y in x:
                eat(y)
        else:
            h.update(x.hex().encode() if isinstance(x, float) else repr(x).encode())

    eat(things)
    return h.hexdigest()


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
