import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
            for _ in range(3)
        )
        self.tail = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = x + (
                checkpoint(block, x, use_reentrant=False) if i % 2 == 0 else checkpoint(block, x, use_reentrant=True)
            )
        return self.out(checkpoint_sequential(self.tail, 2, x, use_reentrant=False))


net = Deep()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
losses = []
for _ in range(15 * times):
    x = torch.randn(12, 8)
    loss = F.mse_loss(net(x), x[:, :2].cumprod(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
