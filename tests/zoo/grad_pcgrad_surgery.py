import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(12, 24), nn.ReLU())
        self.a, self.b = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, x):
        h = self.shared(x)
        return self.a(h), self.b(h)


net = TwoHeads()
params = list(net.parameters())
opt = torch.optim.Adam(params, lr=2e-3)
losses = []
for _ in range(20 * times):
    x = torch.randn(20, 12)
    a, b = net(x)
    l1, l2 = F.cross_entropy(a, x[:, :3].argmax(1)), F.mse_loss(b, x.prod(1, keepdim=True))
    g1 = torch.autograd.grad(l1, params, retain_graph=True, allow_unused=True)
    g2 = torch.autograd.grad(l2, params, allow_unused=True)
    opt.zero_grad()
    for p, u, v in zip(params, g1, g2):
        u = torch.zeros_like(p) if u is None else u
        v = torch.zeros_like(p) if v is None else v
        dot = (u * v).sum()
        if dot < 0:
            u, v = u - dot / (v.norm() ** 2 + 1e-8) * v, v - dot / (u.norm() ** 2 + 1e-8) * u
        p.grad = u + v
    opt.step()
    losses += [l1.item(), l2.item()]
print("BITS", fingerprint(net, opt, losses))
