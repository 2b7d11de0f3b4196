import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Adaptive(nn.Module):
    """Early exit: easy batches leave after the first block; hard ones loop until they settle."""

    def __init__(self):
        super().__init__()
        self.first, self.loop = nn.Linear(12, 16), nn.Linear(16, 16)
        self.exit, self.final = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        early = self.exit(h)
        if early.softmax(1).amax(1).mean() > 0.55:
            return early
        for _ in range(4):
            new = torch.tanh(self.loop(h))
            done = (new - h).abs().mean() < 0.2
            h = new
            if done:
                break
        if x.mean() > 0:
            h = h * 2
        return self.final(h)


net = Adaptive()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
losses = []
for _ in range(30 * times):
    x = torch.randn(12, 12) * (0.5 + torch.rand(1))
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
