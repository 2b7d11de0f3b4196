import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def adaptive_clip(module, clip=0.02):
    for p in module.parameters():
        if p.grad is None:
            continue
        p_norm = p.detach().norm().clamp(min=1e-3)
        g_norm = p.grad.detach().norm()
        if g_norm > clip * p_norm:
            p.grad.detach().mul_(clip * p_norm / g_norm.clamp(min=1e-6))


net = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
grads, losses = [], []
for step in range(24 * times):
    x = torch.randn(16, 6)
    loss = F.mse_loss(net(x), x.pow(2).sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    adaptive_clip(net)
    if step % 5 == 4:
        net[2].weight.grad = None  # this layer rests
        net[2].bias.grad.zero_()
    grads.append([0.0 if p.grad is None else p.grad.norm().item() for p in net.parameters()])
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, grads))
