import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def l2_penalty(module, lam):
    reg = torch.zeros(())
    for name, w in module.named_parameters():
        if name.endswith("weight"):
            reg = reg + w.pow(2).sum()
    return lam * reg


net = nn.Sequential(nn.Linear(7, 28), nn.Tanh(), nn.Linear(28, 28), nn.Tanh(), nn.Linear(28, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.8)
mse = nn.MSELoss()
losses = []
for epoch in range(25 * times):
    reg = l2_penalty(net, 1e-2)
    x = torch.randn(20, 7)
    pred = net(x)
    loss = reg + mse(pred, torch.stack([x.sum(1), x.prod(1)], 1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
