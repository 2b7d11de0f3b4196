import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Reg(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.gru = nn.GRUCell(6, 6)

    def forward(self, x, target):
        h = torch.zeros(x.size(1), 6)
        loss = 0.0
        for t in range(x.size(0)):
            h = self.gru(x[t], h)
            loss = loss + (self.lin(h) - target[t]).pow(2).mean()
        return loss / x.size(0), h


model = Reg()
opt = torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.5, centered=True)
hist = []
for _ in range(20 * times):
    x = torch.randn(5, 7, 6)
    loss, h = model(x, x.cumsum(0))
    loss *= x.size(1)
    loss += 0.001 * h.pow(2).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
print("BITS", fingerprint(model, opt, hist))
