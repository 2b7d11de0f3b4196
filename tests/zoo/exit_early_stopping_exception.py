import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class EarlyStopping(Exception):
    pass


class Patience:
    def __init__(self, n):
        self.n, self.best, self.bad = n, float("inf"), 0

    def __call__(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, value)
        if self.bad >= self.n:
            raise EarlyStopping(f"no progress for {self.n} checks")


net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.5)
patience, losses = Patience(4), []
try:
    for step in range(100 * times):
        x = torch.randn(16, 6)
        loss = F.cross_entropy(net(x), torch.randint(0, 2, (16,)))
        opt.zero_grad()
        loss.backward()
        patience(loss.item()) if step > 15 else None
        opt.step()
        losses.append(loss.item())
except EarlyStopping as stop:
    print("stopped:", stop)
print("BITS", fingerprint(net, opt, losses))
