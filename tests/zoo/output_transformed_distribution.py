import os

import torch
from bits import fingerprint
from torch import nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import AffineTransform, TanhTransform

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class SquashedActor(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 24), nn.ReLU())
        self.mu, self.log_std = nn.Linear(24, 2), nn.Linear(24, 2)

    def forward(self, s):
        h = self.trunk(s)
        base = Independent(Normal(self.mu(h), self.log_std(h).clamp(-4, 1).exp()), 1)
        return TransformedDistribution(base, [TanhTransform(cache_size=1), AffineTransform(0.0, 2.0)])


actor = SquashedActor()
critic = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 1))
a_opt = torch.optim.Adam(actor.parameters(), lr=3e-3)
c_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
log = []
for it in range(18 * times):
    s = torch.randn(32, 5)
    with torch.no_grad():
        a = actor(s).rsample()
    r = -(a - s[:, :2]).pow(2).sum(1, keepdim=True)
    q_loss = (critic(torch.cat([s, a], 1)) - r).pow(2).mean()
    c_opt.zero_grad()
    q_loss.backward()
    c_opt.step()

    dist = actor(s)
    a = dist.rsample()
    logp = dist.log_prob(a)
    a_loss = (0.1 * logp - critic(torch.cat([s, a], 1)).squeeze(1)).mean()
    a_opt.zero_grad()
    a_loss.backward()
    a_opt.step()
    log += [q_loss.item(), a_loss.item()]
print("BITS", fingerprint(actor, critic, a_opt, c_opt, log))
