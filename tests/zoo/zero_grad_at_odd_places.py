import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for step in range(28 * times):
    x = torch.randn(12, 8)
    out = net(x)
    net.zero_grad()  # between forward and backward
    loss = F.mse_loss(out, x[:, :2])
    loss.backward()
    if step % 7 == 3:
        net.zero_grad(set_to_none=False)  # this batch is not to count
        losses.append(loss.item())
    opt.step()
    if step % 5 == 0:
        for p in net.parameters():
            p.grad = None
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
