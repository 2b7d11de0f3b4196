import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class MultiTaskLoss(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        return sum(torch.exp(-s) * loss + s for s, loss in zip(self.log_vars, losses))


trunk = nn.Sequential(nn.Linear(14, 28), nn.ReLU())
heads = nn.ModuleDict({"cls": nn.Linear(28, 4), "reg": nn.Linear(28, 2)})
weigh = MultiTaskLoss(2)
opt = torch.optim.Adam(
    [{"params": trunk.parameters()}, {"params": heads.parameters()}, {"params": weigh.parameters(), "lr": 1e-2}],
    lr=2e-3,
)
log = []
for _ in range(22 * times):
    x = torch.randn(20, 14)
    h = trunk(x)
    parts = [F.cross_entropy(heads["cls"](h), x[:, :4].argmax(1)), F.mse_loss(heads["reg"](h), x[:, 4:6] ** 2)]
    loss = weigh(parts)
    opt.zero_grad()
    loss.backward()
    opt.step()
    log.append(loss.item())
print("BITS", fingerprint(trunk, heads, weigh, opt, log))
