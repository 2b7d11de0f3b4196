import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
losses, micro = [], 2
for step in range(16 * times):
    opt.zero_grad(set_to_none=True)
    total = 0.0
    for _ in range(micro):
        x = torch.randn(12, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x)
            loss = F.cross_entropy(out.float(), x[:, :4].argmax(1)) / micro
        loss.backward()
        total += loss.item()
    opt.step()
    losses.append(total)
print("BITS", fingerprint(net, opt, losses))
