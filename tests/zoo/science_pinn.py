import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)


def residual(x, t):
    u = net(torch.cat([x, t], 1))
    u_t = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
    u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u), create_graph=True)[0]
    return u_t + u * u_x - 0.01 / torch.pi * u_xx


losses = []
for epoch in range(18 * times):
    x = (torch.rand(40, 1) * 2 - 1).requires_grad_()
    t = torch.rand(40, 1, requires_grad=True)
    xi = torch.rand(20, 1) * 2 - 1
    ic = (net(torch.cat([xi, torch.zeros_like(xi)], 1)) + torch.sin(torch.pi * xi)).pow(2).mean()
    loss = residual(x, t).pow(2).mean() + ic
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
