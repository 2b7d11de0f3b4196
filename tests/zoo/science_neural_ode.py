import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))
        self.nfe = 0

    def forward(self, t, y):
        self.nfe += 1
        return self.net(y**3)


def odeint(func, y0, ts):
    ys = [y0]
    for t0, t1 in zip(ts[:-1], ts[1:]):
        ys.append(ys[-1] + (t1 - t0) * func(t0, ys[-1]))
    return torch.stack(ys)


A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
ts = torch.linspace(0, 1, 9)
func = ODEFunc()
opt = torch.optim.RMSprop(func.parameters(), lr=1e-3)
losses = []
for _ in range(18 * times):
    y0 = torch.randn(16, 2)
    with torch.no_grad():
        truth = odeint(lambda t, y: y**3 @ A, y0.clamp(-1, 1), ts)
    pred = odeint(func, y0.clamp(-1, 1), ts)
    loss = (pred - truth).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
assert func.nfe == 18 * 8, func.nfe
print("BITS", fingerprint(func, opt, losses))
