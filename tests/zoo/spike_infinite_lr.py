import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
losses = []
good = {k: v.clone() for k, v in net.state_dict().items()}
for step in range(24 * times):
    warm = max(0, 12 - step) if step != 12 else 0
    opt.param_groups[0]["lr"] = 0.05 / warm if warm else (float("inf") if step == 12 else 0.05)  # off by one
    x = torch.randn(16, 5)
    loss = F.mse_loss(net(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    if not all(torch.isfinite(p).all() for p in net.parameters()):
        net.load_state_dict(good)
    good = {k: v.clone() for k, v in net.state_dict().items()}
print("BITS", fingerprint(net, opt, losses))
