import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.SiLU())
        self.rate = nn.Linear(32, 1)
        self.mean = nn.Linear(32, 1)
        self.logvar = nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return {"log_rate": self.rate(h), "mean": self.mean(h), "var": self.logvar(h).exp() + 1e-4}


net = Heads()
opt = torch.optim.Adamax(net.parameters(), lr=4e-3)
poisson = nn.PoissonNLLLoss(log_input=True, full=True)
gauss = nn.GaussianNLLLoss()
losses = []
for _ in range(22 * times):
    x = torch.randn(40, 6)
    counts = torch.poisson(x[:, :1].exp().clamp(max=8))
    y = x[:, 1:2] + 0.3 * torch.randn(40, 1) * x[:, 2:3].abs()
    out = net(x)
    loss = poisson(out["log_rate"], counts) + gauss(out["mean"], y, out["var"])
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
