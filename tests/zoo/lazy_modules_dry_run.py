import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(
    nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(12), nn.ReLU(), nn.LazyLinear(3)
)
net(torch.zeros(2, 1, 6, 6))  # dry run: makes the parameters
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
# a second dry run, with backward, to see that it fits in memory
F.cross_entropy(net(torch.randn(4, 1, 6, 6)), torch.zeros(4, dtype=torch.long)).backward()
opt.zero_grad()
losses = []
for _ in range(16 * times):
    x = torch.randn(8, 1, 6, 6)
    loss = F.cross_entropy(net(x), torch.randint(0, 3, (8,)))
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
