import hashlib
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def fingerprint(*things):
    h = hashlib.sha256()

    def eat(x):
        if isinstance(x, torch.Tensor):
            x = x.detach()
            x = x.to_dense() if x.is_sparse else x
            h.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, nn.Module):
            eat(list(x.parameters()))
            eat(list(x.buffers()))
        elif isinstance(x, torch.optim.Optimizer):
            eat(x.state_dict()["state"])
        elif isinstance(x, dict):
            for k in x:
                eat(x[k])
        elif isinstance(x, (list, tuple)):
            for y in x:
                eat(y)
        else:
            h.update(x.hex().encode() if isinstance(x, float) else repr(x).encode())

    eat(things)
    return h.hexdigest()


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
