import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(13, 26), nn.Mish(), nn.Linear(26, 26), nn.Mish(), nn.Linear(26, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
losses = []
for t in range(30 * times):
    x = torch.randn(16, 13)
    loss = F.cross_entropy(net(x), (x[:, :3] ** 2).argmax(1))
    net.zero_grad()
    loss.backward()
    sigma = (0.01 / (1 + t) ** 0.55) ** 0.5
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.grad.mul_(0.9**i)
            p.grad.add_(torch.randn_like(p.grad), alpha=sigma)
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
