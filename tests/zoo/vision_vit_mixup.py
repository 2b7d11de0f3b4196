import os

import numpy as np
import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
np.random.seed(SEED)
torch.manual_seed(SEED)


class ViT(nn.Module):
    def __init__(self, d=16, classes=5):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.pos = nn.Parameter(torch.randn(1, 5, d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, 2, 32, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], 1) + self.pos
        return self.head(self.encoder(x)[:, 0])


net = ViT()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 15)
losses = []
for step in range(15 * times):
    x, y = torch.rand(8, 3, 8, 8), torch.randint(0, 5, (8,))
    lam = float(np.random.beta(0.8, 0.8))
    perm = torch.randperm(8)
    out = net(lam * x + (1 - lam) * x[perm])
    loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[perm])
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
