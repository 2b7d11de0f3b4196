import os
from collections import namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from bits import fingerprint
from torch.distributions import Categorical

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))
SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(3, 16)
        self.action_head, self.value_head = nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model = ActorCritic()
opt = torch.optim.Adam(model.parameters(), lr=3e-2)
log = []
for episode in range(15 * times):
    saved, rewards, s = [], [], torch.randn(3)
    for t in range(1 + int(torch.randint(3, 8, ()))):
        probs, value = model(s)
        m = Categorical(probs)
        a = m.sample()
        saved.append(SavedAction(m.log_prob(a), value))
        rewards.append(float(a == (s[0] > 0)))
        s = torch.randn(3)
    R, policy_losses, value_losses = 0.0, [], []
    for (log_prob, value), r in zip(reversed(saved), reversed(rewards)):
        R = r + 0.9 * R
        policy_losses.append(-log_prob * (R - value.item()))
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    opt.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    opt.step()
    log.append(loss.item())
print("BITS", fingerprint(model, opt, log))
