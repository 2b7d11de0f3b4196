import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class CachedGCN(nn.Module):
    """Historical embeddings: a node's last value is used for neighbours outside the batch."""

    def __init__(self, n, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.out = nn.Linear(2 * d, 3)
        self.cache = {}
        self.hits = 0

    def forward(self, ids, feats, neighbours):
        h = torch.tanh(self.lin(feats))
        agg = []
        for row, node in enumerate(ids.tolist()):
            old = [self.cache[m] for m in neighbours[node] if m in self.cache]
            self.hits += len(old)
            agg.append(torch.stack(old).mean(0) if old else torch.zeros(h.shape[1]))
            self.cache[node] = h[row].detach()
        return self.out(torch.cat([h, torch.stack(agg)], 1))


n, d = 30, 6
neighbours = {i: torch.randperm(n)[:3].tolist() for i in range(n)}
X, Y = torch.randn(n, d), torch.randint(0, 3, (n,))
net = CachedGCN(n, d)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
losses = []
for step in range(20 * times):
    ids = torch.randperm(n)[:8]
    loss = F.cross_entropy(net(ids, X[ids], neighbours), Y[ids])
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, net.hits, net.cache))
