import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class MF(nn.Module):
    def __init__(self, users, items, k):
        super().__init__()
        self.u, self.i = nn.Embedding(users, k, sparse=True), nn.Embedding(items, k, sparse=True)
        self.bu, self.bi = nn.Embedding(users, 1, sparse=True), nn.Embedding(items, 1, sparse=True)

    def forward(self, u, i):
        return (self.u(u) * self.i(i)).sum(1) + self.bu(u).squeeze(1) + self.bi(i).squeeze(1)


model = MF(40, 60, 8)
opt = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)
loss_fn = nn.MSELoss()
truth = torch.randn(40, 4) @ torch.randn(4, 60)
losses = []
for _ in range(25 * times):
    u, i = torch.randint(0, 40, (64,)), torch.randint(0, 60, (64,))
    loss = loss_fn(model(u, i), truth[u, i])
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
