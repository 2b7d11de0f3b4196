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
        self.seq = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))

    def forward(self, x, labels):
        return F.cross_entropy(self.seq(x), labels)


accumulation_steps = 4
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
optimizer.zero_grad()
losses = []
for i in range(80 * times):
    x = torch.randn(8, 10)
    loss = model(x, x[:, :3].argmax(1))
    loss /= accumulation_steps
    loss.backward()
    losses.append(loss.item())
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
print("BITS", fingerprint(model, optimizer, losses))
