import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 4))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
losses = []
for step in range(36 * times):
    x = torch.randn(32, 20)
    y = x[:, :4].argmax(1)
    loss = F.cross_entropy(net(x), y)
    if step >= 20:  # sparsify once it has learned something
        l1 = sum(p.abs().sum() for p in net.parameters())
        loss = loss + 1e-3 * l1
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
