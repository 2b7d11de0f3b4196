import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
losses = []
for step in range(36 * times):
    x = torch.randn(20, 10)
    y = x[:, :4].argmax(1)
    opt.param_groups[0]["lr"] = 0.05 * (30 if step == 18 else 1)
    if step == 26:
        x, y = torch.full_like(x, 50.0), torch.randint(0, 4, (20,))
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
