import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
matrices = [p for p in net.parameters() if p.dim() == 2]
vectors = [p for p in net.parameters() if p.dim() < 2]
muon, adam = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=1e-2)
rprop = torch.optim.Rprop(net[4].parameters(), lr=1e-3)
losses = []
for step in range(14 * times):
    x = torch.randn(16, 10)
    loss = F.cross_entropy(net(x), (x.sum(1) > 0).long())
    for opt in (muon, adam, rprop):
        opt.zero_grad()
    loss.backward()
    muon.step()
    adam.step()
    if step % 4 == 3:
        rprop.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, muon, adam, rprop, losses))
