import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Flaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(9, 18), nn.Linear(18, 3)

    def forward(self, x):
        h = self.a(x).relu()
        if x.size(0) > 24:
            raise RuntimeError("out of memory (tried to allocate 12.00 GiB)")
        return self.b(h)


net = Flaky()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
losses, retries = [], 0
for step in range(20 * times):
    x = torch.randn(32 if step % 6 == 5 else 16, 9)
    y = x[:, :3].argmax(1)
    opt.zero_grad()
    try:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
    except RuntimeError as e:
        if "out of memory" not in str(e):
            raise
        retries += 1
        opt.zero_grad()
        total = 0.0
        for xs, ys in zip(x.chunk(2), y.chunk(2)):
            part = F.cross_entropy(net(xs), ys) / 2
            part.backward()
            total += part.item()
        loss = torch.tensor(total)
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, retries))
