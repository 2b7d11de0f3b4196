import math
import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
skipped, losses = 0, []
for step in range(25 * times):
    x = torch.randn(12, 7)
    if step in (9, 17):
        x[0, 0] = float("nan")  # a broken record in the data
    loss = F.mse_loss(net(x), x.nan_to_num().sum(1, keepdim=True))
    if math.isnan(loss.item()):
        skipped += 1
        continue
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if not torch.isfinite(norm):
        continue
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, skipped))
