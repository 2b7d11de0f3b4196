import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
bias_opt = torch.optim.SGD([p for n, p in net.named_parameters() if "bias" in n], lr=0.05)
velocity = {n: torch.zeros_like(p) for n, p in net.named_parameters() if "weight" in n}
losses = []
for step in range(25 * times):
    x = torch.randn(16, 6)
    loss = nn.functional.mse_loss(net(x), x[:, :1] * x[:, 1:2])
    net.zero_grad()
    loss.backward()
    bias_opt.step()
    with torch.no_grad():  # the weights are updated by hand
        for n, p in net.named_parameters():
            if n in velocity:
                velocity[n] = 0.9 * velocity[n] + p.grad
                p -= 0.02 * velocity[n]
    losses.append(loss.item())
print("BITS", fingerprint(net, velocity, losses))
