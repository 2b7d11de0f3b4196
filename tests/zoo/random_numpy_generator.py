import os

import numpy as np
import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
torch.manual_seed(SEED)
np.random.seed(SEED)


class RandomMaskedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(14, 28), nn.Linear(28, 3)
        self.rng = np.random.default_rng(SEED)

    def forward(self, x):
        h = F.relu(self.a(x))
        if self.training:
            keep = self.rng.permutation(28)[:20]
            mask = torch.zeros(28)
            mask[torch.from_numpy(keep)] = 1.4
            h = h * mask
            if np.random.rand() < 0.2:  # the global state, too
                h = h + float(np.random.normal()) * 0.01
        return self.b(h)


net = RandomMaskedMLP()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for _ in range(30 * times):
    x = torch.from_numpy(np.random.randn(16, 14).astype(np.float32))
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, float(net.rng.random()), float(np.random.rand())))
