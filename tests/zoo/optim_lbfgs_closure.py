import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))
opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe")
x = torch.randn(60, 2)
y = torch.sin(x[:, :1]) * x[:, 1:]
calls = []
for step in range(15 * times):

    def closure():
        opt.zero_grad()
        loss = (net(x) - y).pow(2).mean() + 1e-4 * sum(p.pow(2).sum() for p in net.parameters())
        loss.backward()
        calls.append(loss.item())
        return loss

    opt.step(closure)
print("BITS", fingerprint(net, opt, calls))
