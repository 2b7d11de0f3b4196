import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.b1 = nn.Sequential(nn.Linear(10, 20), nn.ReLU())
        self.b2 = nn.Sequential(nn.Linear(20, 20), nn.ReLU())
        self.head = nn.Linear(20, 3)

    def forward(self, x):
        x = self.b1.forward(x)
        x = self.b2.forward(x) + x
        return self.head.forward(x)


model = Net()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for i in range(25 * times):
    x = torch.randn(16, 10)
    loss = F.cross_entropy(model.forward(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
