import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn
from torch.func import functional_call

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
meta_opt = torch.optim.Adam(net.parameters(), lr=1e-2)
losses = []
for it in range(15 * times):
    meta_opt.zero_grad()
    outer = 0.0
    for task in range(3):
        amp, phase = torch.rand(1) * 4 + 0.1, torch.rand(1) * 3.14
        xs, xq = torch.rand(10, 1) * 10 - 5, torch.rand(10, 1) * 10 - 5
        fast = dict(net.named_parameters())
        for _ in range(2):
            inner = F.mse_loss(functional_call(net, fast, (xs,)), amp * torch.sin(xs + phase))
            grads = torch.autograd.grad(inner, tuple(fast.values()), create_graph=True)
            fast = {n: w - 0.01 * g for (n, w), g in zip(fast.items(), grads)}
        outer = outer + F.mse_loss(functional_call(net, fast, (xq,)), amp * torch.sin(xq + phase))
    outer = outer / 3
    outer.backward()
    meta_opt.step()
    losses.append(outer.item())
print("BITS", fingerprint(net, meta_opt, losses))
