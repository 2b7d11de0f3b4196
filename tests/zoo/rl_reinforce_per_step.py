import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from bits import fingerprint
from torch.distributions import Categorical

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Policy(nn.Module):
    def __init__(self):
        super(Policy, self).__init__()
        self.affine1 = nn.Linear(4, 24)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(24, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.dropout(self.affine1(x)))
        return F.softmax(self.affine2(x), dim=1)


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
log = []
for episode in range(15 * times):
    state = torch.randn(4) * 0.1
    for t in range(8):
        probs = policy(state.unsqueeze(0))
        m = Categorical(probs)
        action = m.sample()
        policy.saved_log_probs.append(m.log_prob(action))
        state = state * 0.9 + 0.2 * (action.item() - 0.5) + 0.05 * torch.randn(4)
        policy.rewards.append(1.0 - state.abs().mean().item())
    R, returns = 0, []
    for r in policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    optimizer.zero_grad()
    loss = torch.cat([-lp * R for lp, R in zip(policy.saved_log_probs, returns)]).sum()
    loss.backward()
    optimizer.step()
    log.append(loss.item())
    del policy.rewards[:]
    del policy.saved_log_probs[:]
print("BITS", fingerprint(policy, optimizer, log))
