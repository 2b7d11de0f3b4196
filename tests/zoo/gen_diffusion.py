import math
import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Denoiser(nn.Module):
    def __init__(self, dim=8, hidden=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.inp, self.mid, self.out = nn.Linear(dim, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, dim)
        self.norm = nn.GroupNorm(4, hidden)

    def forward(self, x, t):
        freqs = torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        emb = torch.cat([torch.sin(t[:, None] * freqs), torch.cos(t[:, None] * freqs)], 1)
        h = self.inp(x) + self.time(emb)
        return self.out(F.silu(self.mid(F.silu(self.norm(h)))))


T = 50
betas = torch.linspace(1e-4, 0.1, T)
alpha_bar = torch.cumprod(1 - betas, 0)
model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
ema = {k: v.clone() for k, v in model.state_dict().items()}
losses = []
for step in range(25 * times):
    x0 = torch.randn(16, 8) * 0.2 + torch.randint(0, 2, (16, 1)) * 2 - 1
    t = torch.randint(0, T, (16,))
    noise = torch.randn_like(x0)
    xt = alpha_bar[t, None].sqrt() * x0 + (1 - alpha_bar[t, None]).sqrt() * noise
    loss = F.mse_loss(model(xt, t.float()), noise)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    for k, v in model.state_dict().items():
        ema[k].lerp_(v, 0.05)
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, ema, losses))
