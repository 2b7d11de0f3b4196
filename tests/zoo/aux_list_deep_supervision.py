import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class DeepSupervised(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(depth))
        self.aux_losses = []

    def forward(self, x, y):
        self.aux_losses = []
        for layer, head in zip(self.layers, self.heads):
            x = torch.relu(layer(x))
            logits = head(x)
            self.aux_losses.append(F.cross_entropy(logits, y))
        return logits


net = DeepSupervised()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
log = []
for step in range(20 * times):
    x = torch.randn(20, 16)
    y = torch.randint(0, 3, (20,))
    logits = net(x, y)
    main = F.cross_entropy(logits, y)
    total = main + 0.3 * sum(net.aux_losses[:-1])
    opt.zero_grad()
    total.backward()
    opt.step()
    log.append(total.item())
print("BITS", fingerprint(net, opt, log))
