import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class LSHAttention(nn.Module):
    """Random projections fixed by a seed per call, under fork_rng; dropout outside of it."""

    def __init__(self, d=12):
        super().__init__()
        self.qk, self.v, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.call = 0

    def forward(self, x):
        self.call += 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + self.call)
            proj = torch.randn(x.size(-1), 4)
        buckets = (self.qk(x) @ proj).argmax(-1)
        same = buckets[:, :, None] == buckets[:, None, :]
        att = (self.qk(x) @ self.qk(x).transpose(1, 2) / 12**0.5).masked_fill(~same, -1e9).softmax(-1)
        return self.out(F.dropout(att, 0.1, self.training) @ self.v(x))


net = LSHAttention()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
losses = []
for _ in range(18 * times):
    x = torch.randn(4, 8, 12)
    loss = F.mse_loss(net(x), x.flip(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
