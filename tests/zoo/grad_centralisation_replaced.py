import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7 * 16, 4))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
losses = []
for t in range(20 * times):
    x = torch.randn(8, 1, 8, 8)
    y = torch.randint(0, 4, (8,))
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    for p in net.parameters():
        if p.dim() > 1:
            p.grad = p.grad - p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True)
        else:
            p.grad = torch.sign(p.grad) * 1e-2
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
