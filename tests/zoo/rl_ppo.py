import os

import torch
from bits import fingerprint
from torch import nn
from torch.distributions import Normal

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor_mean = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 2))
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.orthogonal_(m.weight, 2**0.5)
                nn.init.zeros_(m.bias)

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        mean = self.actor_mean(x)
        probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
log = []
for update in range(3 * times):
    optimizer.param_groups[0]["lr"] = (1 - update / 3) * 2.5e-3
    with torch.no_grad():
        obs = torch.randn(64, 6)
        actions, logprobs, _, values = agent.get_action_and_value(obs)
        rewards = -(actions - obs[:, :2]).pow(2).sum(1)
        advantages = rewards + 0.1 * agent.get_value(torch.randn(64, 6)).squeeze(1) - values.squeeze(1)
        returns = advantages + values.squeeze(1)
    for epoch in range(2):
        for mb in torch.randperm(64).split(16):
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs[mb], actions[mb])
            ratio = (newlogprob - logprobs[mb]).exp()
            adv = (advantages[mb] - advantages[mb].mean()) / (advantages[mb].std() + 1e-8)
            pg = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            clipped = values[mb, 0] + (newvalue[:, 0] - values[mb, 0]).clamp(-0.2, 0.2)
            v = 0.5 * torch.max((newvalue[:, 0] - returns[mb]) ** 2, (clipped - returns[mb]) ** 2).mean()
            loss = pg - 0.01 * entropy.mean() + 0.5 * v
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            log.append(loss.item())
print("BITS", fingerprint(agent, optimizer, log))
