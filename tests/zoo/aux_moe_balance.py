import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Moe(nn.Module):
    def __init__(self, d, n, k=2):
        super().__init__()
        self.router = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d)) for _ in range(n)
        )
        self.n, self.k = n, k
        self.aux_loss = None

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        w, idx = probs.topk(self.k, dim=-1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = (idx == e).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * w[rows, slot, None])
        load = F.one_hot(idx, self.n).float().sum(1).mean(0)
        self.aux_loss = self.n * (load * probs.mean(0)).sum()
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(10, 12)
        self.layers = nn.ModuleList([Moe(12, 4), Moe(12, 4)])
        self.out = nn.Linear(12, 5)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
losses = []
for step in range(20 * times):
    x, y = torch.randn(32, 10), torch.randint(0, 5, (32,))
    loss = F.cross_entropy(net(x), y)
    loss = loss + 0.01 * sum(m.aux_loss for m in net.modules() if isinstance(m, Moe))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
