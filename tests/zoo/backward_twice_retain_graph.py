import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


shared = nn.Sequential(nn.Linear(10, 20), nn.ReLU())
cls, rec = nn.Linear(20, 3), nn.Linear(20, 10)
params = [*shared.parameters(), *cls.parameters(), *rec.parameters()]
opt = torch.optim.Adam(params, lr=2e-3)
losses = []
for step in range(22 * times):
    x = torch.randn(16, 10)
    h = shared(x)
    loss_a = F.cross_entropy(cls(h), x[:, :3].argmax(1))
    loss_b = F.mse_loss(rec(h), x)
    opt.zero_grad()
    loss_a.backward(retain_graph=True)
    loss_b.backward()
    if step % 3 == 0:  # and one graph twice
        extra = F.mse_loss(rec(shared(x)), x) * 0.1
        extra.backward(retain_graph=True)
        extra.backward()
    opt.step()
    losses += [loss_a.item(), loss_b.item()]
print("BITS", fingerprint(shared, cls, rec, opt, losses))
