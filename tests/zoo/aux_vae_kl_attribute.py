import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(24, 16)
        self.mu, self.logvar = nn.Linear(16, 4), nn.Linear(16, 4)
        self.dec = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 24))
        self.kl = 0

    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        self.kl = -0.5 * torch.mean(1 + logvar - mu**2 - logvar.exp())
        return self.dec(z)


vae = VAE()
opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
losses = []
for step in range(30 * times):
    x = torch.rand(16, 24)
    recon = vae(x)
    beta = min(1.0, step / 20)  # KL warm-up: zero at first
    loss = F.mse_loss(recon, x) + beta * vae.kl
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(vae, opt, losses))
