import copy
import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class BYOL(nn.Module):
    def __init__(self, encoder, dim):
        super().__init__()
        self.online = encoder
        self.predictor = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, dim))
        self.target = copy.deepcopy(encoder).requires_grad_(False)

    @torch.no_grad()
    def update(self, tau=0.97):
        for o, t in zip(self.online.parameters(), self.target.parameters()):
            t.lerp_(o, 1 - tau)

    def forward(self, a, b):
        p1, p2 = self.predictor(self.online(a)), self.predictor(self.online(b))
        with torch.no_grad():
            z1, z2 = self.target(a), self.target(b)
        return -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean())


net = BYOL(nn.Sequential(nn.Linear(18, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)), 8)
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=2e-3)
losses = []
for i in range(16 * times):
    x = torch.randn(24, 18)
    loss = net(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
    opt.zero_grad()
    loss.backward()
    opt.step()
    net.update()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
