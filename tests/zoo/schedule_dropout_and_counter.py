import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Curriculum(nn.Module):
    """Counts its own calls; opens one more block every eight of them."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(10, 20)
        self.blocks = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.drop = nn.Dropout(0.0)
        self.out = nn.Linear(20, 2)
        self.calls = 0
        self.history = []

    def forward(self, x):
        self.calls += 1
        x = self.inp(x).relu()
        for block in self.blocks[: 1 + self.calls // 8]:
            x = x + self.drop(block(x)).relu()
        self.history.append(x.detach().mean().item())
        return self.out(x)


net = Curriculum()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
losses = []
for step in range(26 * times):
    net.drop.p = 0.5 * step / 26
    x = torch.randn(20, 10)
    loss = F.mse_loss(net(x), x[:, :2] * x[:, 2:4])
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, net.calls, net.history))
