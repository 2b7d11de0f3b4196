import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Potential(nn.Module):
    """Forces are the energy's gradient, taken inside forward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 1))
        self.register_buffer("centers", torch.linspace(0.2, 3, 8))

    def forward(self, pos):
        pos = pos.requires_grad_(True)
        d = (pos[:, None] - pos[None] + 1e-6).norm(dim=-1)
        i, j = torch.triu_indices(len(pos), len(pos), 1)
        rbf = torch.exp(-((d[i, j][:, None] - self.centers) ** 2))
        energy = self.net(rbf).sum()
        forces = -torch.autograd.grad(energy, pos, create_graph=self.training)[0]
        return energy, forces


model = Potential()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=True)
losses = []
for _ in range(16 * times):
    pos = torch.randn(7, 3)
    target_e, target_f = pos.pow(2).sum() * 0.1, -0.2 * pos.detach().clone()
    energy, forces = model(pos)
    loss = (energy - target_e).pow(2) + 10 * (forces - target_f).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
