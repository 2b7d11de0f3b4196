import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(real.size(0), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    grads = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True)[0]
    return ((grads.norm(2, dim=1) - 1) ** 2).mean()


G = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
og = torch.optim.Adam(G.parameters(), 1e-3, betas=(0.0, 0.9))
od = torch.optim.Adam(D.parameters(), 1e-3, betas=(0.0, 0.9))
hist = []
for step in range(24 * times):
    real = torch.randn(32, 2) @ torch.tensor([[1.0, 0.3], [0.0, 0.5]])
    fake = G(torch.randn(32, 3)).detach()
    d_loss = D(fake).mean() - D(real).mean() + 10.0 * gradient_penalty(D, real, fake)
    od.zero_grad()
    d_loss.backward()
    od.step()
    hist.append(d_loss.item())
    if step % 3 == 2:
        g_loss = -D(G(torch.randn(32, 3))).mean()
        og.zero_grad()
        g_loss.backward()
        og.step()
        hist.append(g_loss.item())
print("BITS", fingerprint(G, D, og, od, hist))
