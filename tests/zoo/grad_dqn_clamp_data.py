import math
import os
import random
from collections import deque, namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from bits import fingerprint

seed = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
random.seed(seed)
torch.manual_seed(seed)

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class DQN(nn.Module):
    def __init__(self):
        super(DQN, self).__init__()
        self.layer1 = nn.Linear(4, 32)
        self.layer2 = nn.Linear(32, 2)

    def forward(self, x):
        return self.layer2(F.relu(self.layer1(x)))


policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
target_net.eval()
optimizer = optim.RMSprop(policy_net.parameters())
memory = deque(maxlen=200)
losses = []


def select_action(state, steps_done):
    eps = 0.05 + 0.85 * math.exp(-steps_done / 20)
    if random.random() > eps:
        with torch.no_grad():
            return policy_net(state).max(1)[1].view(1, 1)
    return torch.tensor([[random.randrange(2)]])


def optimize_model():
    if len(memory) < 16:
        return
    batch = Transition(*zip(*random.sample(memory, 16)))
    state_action_values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
    next_values = target_net(torch.cat(batch.next_state)).max(1)[0].detach()
    expected = torch.cat(batch.reward) + 0.9 * next_values
    loss = F.smooth_l1_loss(state_action_values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    for param in policy_net.parameters():
        param.grad.data.clamp_(-0.01, 0.01)
    optimizer.step()
    losses.append(loss.item())


state = torch.randn(1, 4)
for t in range(50 * times):
    action = select_action(state, t)
    next_state = state * 0.9 + 0.3 * torch.randn(1, 4)
    reward = torch.tensor([10.0 if (state[0, 0] > 0) == bool(action.item()) else -10.0])
    memory.append(Transition(state, action, next_state, reward))
    state = next_state
    optimize_model()
    if t % 10 == 0:
        target_net.load_state_dict(policy_net.state_dict())
print("BITS", fingerprint(policy_net, target_net, optimizer, losses))
