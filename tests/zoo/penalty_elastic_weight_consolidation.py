import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(14, 28), nn.ReLU(), nn.Linear(28, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
losses = []


def task(shift, steps, anchors=None, fisher=None):
    for _ in range(steps * times):
        x = torch.randn(20, 14) + shift
        y = (x[:, :3] * (1 + shift)).argmax(1)
        loss = F.cross_entropy(net(x), y)
        if anchors is not None:
            for n, p in net.named_parameters():
                loss += 50.0 * (fisher[n] * (p - anchors[n]) ** 2).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())


task(0.0, 14)
fisher = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
for _ in range(4):
    net.zero_grad()
    x = torch.randn(20, 14)
    F.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
    for n, p in net.named_parameters():
        fisher[n] += p.grad.detach() ** 2 / 4
anchors = {n: p.detach().clone() for n, p in net.named_parameters()}
task(1.0, 14, anchors, fisher)
print("BITS", fingerprint(net, opt, losses))
