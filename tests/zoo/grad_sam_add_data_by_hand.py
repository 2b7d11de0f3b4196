import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for it in range(20 * times):
    x = torch.randn(16, 8)
    y = (x.sum(1) > 0).long()
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    eps = []
    for p in net.parameters():
        e = 0.05 * p.grad.data / (p.grad.data.norm() + 1e-12)
        p.data.add_(e)
        eps.append(e)
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    for p, e in zip(net.parameters(), eps):
        p.data.sub_(e)
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
