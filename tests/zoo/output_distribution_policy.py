import hashlib
import os

import torch
from torch import nn
from torch.distributions import Categorical

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
