import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
T = 0.7
losses = []
for step in range(25 * times):
    x = torch.randn(16, 12)
    legal = torch.rand(16, 8) > 0.3
    legal[:, 0] = True
    logits = net(x)
    logits /= T
    logits[~legal] = -float("inf")
    if step % 3 == 0:
        logits.masked_fill_(x[:, :8] > 2.5, -1e9)
    logits[:, 0].clamp_(min=-50)
    action = torch.where(legal, x[:, :8], torch.tensor(-99.0)).argmax(1)
    loss = F.cross_entropy(logits, action)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
