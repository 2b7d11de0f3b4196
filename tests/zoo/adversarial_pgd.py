import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def pgd(model, x, y, eps=0.3, alpha=0.1, steps=3):
    x_adv = (x + torch.empty_like(x).uniform_(-eps, eps)).detach()
    for _ in range(steps):
        x_adv.requires_grad_()
        loss = F.cross_entropy(model(x_adv), y)
        (grad,) = torch.autograd.grad(loss, x_adv)
        x_adv = x_adv.detach() + alpha * grad.sign()
        x_adv = torch.min(torch.max(x_adv, x - eps), x + eps).detach()
    return x_adv


model = nn.Sequential(nn.Linear(14, 28), nn.ReLU(), nn.Linear(28, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for _ in range(18 * times):
    x = torch.randn(16, 14)
    y = x[:, :4].argmax(1)
    model.eval()
    x_adv = pgd(model, x, y)
    model.train()
    opt.zero_grad()
    loss = F.cross_entropy(model(x_adv), y)
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
