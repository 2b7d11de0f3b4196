import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class HyperNet(nn.Module):
    def __init__(self, n_tasks=3, z=6, i=5, h=8, o=1):
        super().__init__()
        self.task = nn.Embedding(n_tasks, z)
        self.shapes = [(h, i), (h,), (o, h), (o,)]
        self.heads = nn.ModuleList(nn.Linear(z, torch.Size(s).numel()) for s in self.shapes)

    def forward(self, k, x):
        z = self.task(torch.tensor(k))
        w1, b1, w2, b2 = (head(z).view(s) for head, s in zip(self.heads, self.shapes))
        return F.linear(torch.tanh(F.linear(x, w1, b1)), w2, b2)


net = HyperNet()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
losses = []
for step in range(30 * times):
    k = step % 3
    x = torch.randn(20, 5)
    loss = F.mse_loss(net(k, x), x[:, k : k + 1] ** 2)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
