import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


model = nn.Sequential(nn.Linear(5, 15), nn.Softplus(), nn.Linear(15, 1))
optimizer = torch.optim.ASGD(model.parameters(), lr=0.05)
losses = []
for i in range(25 * times):
    inputs = torch.randn(16, 5)
    target = inputs.abs().sum(1, keepdim=True)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(inputs), target)
        loss.backward()
        return loss

    losses.append(optimizer.step(closure).item())
print("BITS", fingerprint(model, optimizer, losses))
