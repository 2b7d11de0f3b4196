import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


model = nn.Sequential(nn.Linear(16, 24, bias=False), nn.ReLU(), nn.Linear(24, 5))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for step in range(30 * times):
    x, y = torch.randn(24, 16), torch.randint(0, 5, (24,))
    opt.zero_grad()
    task = F.cross_entropy(model(x), y)
    task.backward()
    # soft orthogonality of the first layer, every second step, gradients add up
    if step % 2:
        w = model[0].weight
        ortho = 0.05 * (w.t() @ w - torch.eye(16)).pow(2).sum()
        ortho.backward()
        losses.append(ortho.item())
    opt.step()
    losses.append(task.item())
print("BITS", fingerprint(model, opt, losses))
