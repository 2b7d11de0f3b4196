import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


# BinaryConnect: binary weights for forward and backward, real ones for the update
net = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Hardtanh(), nn.Linear(24, 3))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
targets = [net[0].weight, net[3].weight]
losses = []
for step in range(20 * times):
    x = torch.randn(20, 12)
    saved = [w.data.clone() for w in targets]
    for w in targets:
        w.data.copy_(w.data.sign() * w.data.abs().mean())
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    for w, real in zip(targets, saved):
        w.data.copy_(real)
    opt.step()
    for w in targets:
        w.data.mul_(1 - 1e-3).clamp_(-1, 1)
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
