import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)
losses, scales = [], []
for step in range(20 * times):
    x = torch.randn(16, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(net(x).float(), x.sum(1, keepdim=True) * 30)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
    scales.append(scaler.get_scale())
print("BITS", fingerprint(net, opt, losses, scales))
