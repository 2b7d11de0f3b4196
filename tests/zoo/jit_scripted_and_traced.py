import os
import warnings

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

warnings.filterwarnings("ignore")
torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.ih, self.hh = nn.Linear(6, 12), nn.Linear(12, 12)

    def forward(self, xs, h):
        for t in range(xs.size(0)):
            h = torch.tanh(self.ih(xs[t]) + self.hh(h))
        return h


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.jit.script(Cell())
        self.head = torch.jit.trace(nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2)), torch.randn(4, 12))

    def forward(self, xs):
        return self.head(self.cell(xs, torch.zeros(xs.size(1), 12)))


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
losses = []
for _ in range(16 * times):
    xs = torch.randn(5, 10, 6)
    loss = F.mse_loss(net(xs), xs.sum(0)[:, :2])
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
