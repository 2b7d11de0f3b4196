import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))
torch.set_default_dtype(torch.float64)


with torch.device("cpu"):
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
losses = []
for step in range(25 * times):
    with torch.device("cpu"):
        x = torch.randn(16, 6)
        out = net(x)
        loss = F.cross_entropy(out, (x.sum(1) > 0).long())
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
assert torch.get_default_dtype() == torch.float64
with torch.device("meta"):
    assert torch.empty(2).is_meta
assert not torch.empty(2).is_meta
print("BITS", fingerprint(net, opt, losses))
