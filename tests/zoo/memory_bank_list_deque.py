import hashlib
import os
from collections import deque

import torch
import torch.nn.functional as F
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


class WithMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(12, 8)
        self.mix = nn.Linear(16, 3)
        self.bank = deque(maxlen=5)
        self.seen = []

    def forward(self, x):
        z = self.proj(x)
        context = torch.stack(list(self.bank)).mean(0) if self.bank else torch.zeros(8)
        self.bank.append(z.detach().mean(0))
        self.seen.append(float(z.detach().sum()))
        return self.mix(torch.cat([z, context.expand_as(z)], 1))


net = WithMemory()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
losses = []
for _ in range(25 * times):
    x = torch.randn(16, 12) + torch.randn(1)
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, list(net.bank), net.seen))
