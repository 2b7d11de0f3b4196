import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for g in self.param_groups for p in g["params"]]), p=2)
        for g in self.param_groups:
            scale = g["rho"] / (norm + 1e-12)
            for p in g["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for g in self.param_groups:
            for p in g["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError


net = nn.Sequential(nn.Linear(10, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 3))
opt = SAM(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
losses = []
for step in range(20 * times):
    x = torch.randn(24, 10)
    y = x[:, :3].argmax(1)
    if step == 12:  # mislabelled batch: a spike
        y, x = (y + 1) % 3, x * 20
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    opt.first_step()
    F.cross_entropy(net(x), y).backward()
    opt.second_step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, opt.base_optimizer, losses))
