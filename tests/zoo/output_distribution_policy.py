import os

import torch
from bits import fingerprint
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, obs):
        return Categorical(logits=self.net(obs))


policy = Policy()
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
returns = []
for episode in range(25 * times):
    obs = torch.randn(32, 4)
    dist = policy(obs)
    action = dist.sample()
    reward = torch.where(action == (obs[:, 0] > 0).long(), 1.0, -0.2)
    advantage = reward - reward.mean()
    loss = -(dist.log_prob(action) * advantage).mean() - 0.01 * dist.entropy().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    returns += [loss.item(), reward.mean().item()]
print("BITS", fingerprint(policy, opt, returns))
