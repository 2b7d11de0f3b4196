import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 3))
opts = {p: torch.optim.Adam([p], lr=2e-3, foreach=False) for p in net.parameters()}


def step_now(p):
    opts[p].step()
    opts[p].zero_grad()


for p in net.parameters():
    p.register_post_accumulate_grad_hook(step_now)
losses = []
for _ in range(20 * times):
    x = torch.randn(16, 10)
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    loss.backward()
    losses.append(loss.item())
print("BITS", fingerprint(net, list(opts.values()), losses))
