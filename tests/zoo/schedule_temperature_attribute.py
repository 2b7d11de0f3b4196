import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class GumbelAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(16, 4 * 5), nn.Linear(4 * 5, 16)
        self.tau = 2.0

    def forward(self, x):
        logits = self.enc(x).view(-1, 4, 5)
        z = F.gumbel_softmax(logits, tau=self.tau, hard=self.tau < 1.0, dim=-1)
        if self.training:
            self.tau = max(0.5, self.tau * 0.95)  # anneal by call
        return self.dec(z.flatten(1)), logits


net = GumbelAE()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
losses = []
for _ in range(30 * times):
    x = torch.rand(16, 16)
    rec, logits = net(x)
    q = logits.softmax(-1)
    kl = (q * (q.clamp(min=1e-9).log() + torch.log(torch.tensor(5.0)))).sum((1, 2)).mean()
    loss = F.mse_loss(rec, x, reduction="sum") / 16 + 0.1 * kl
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, net.tau))
