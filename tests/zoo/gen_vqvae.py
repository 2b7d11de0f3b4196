import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class VectorQuantizerEMA(nn.Module):
    def __init__(self, n, d, decay=0.95, beta=0.25):
        super().__init__()
        self.embedding = nn.Embedding(n, d)
        self.embedding.weight.requires_grad_(False)
        self.register_buffer("cluster_size", torch.zeros(n))
        self.ema_w = self.embedding.weight.data.clone()
        self.decay, self.beta = decay, beta

    def forward(self, z):
        d = (z**2).sum(1, keepdim=True) + (self.embedding.weight**2).sum(1) - 2 * z @ self.embedding.weight.t()
        idx = d.argmin(1)
        onehot = F.one_hot(idx, self.embedding.num_embeddings).float()
        q = self.embedding(idx)
        if self.training:
            self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
            self.ema_w = self.decay * self.ema_w + (1 - self.decay) * onehot.t() @ z.detach()
            n = self.cluster_size.sum()
            size = (self.cluster_size + 1e-5) / (n + 1e-5 * len(self.cluster_size)) * n
            self.embedding.weight.data.copy_(self.ema_w / size[:, None])
        loss = self.beta * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), loss


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 6))
        self.vq = VectorQuantizerEMA(12, 6)
        self.dec = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 20))

    def forward(self, x):
        q, vq_loss = self.vq(self.enc(x))
        return self.dec(q), vq_loss


model = VQVAE()
opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
losses = []
for _ in range(25 * times):
    x = torch.randn(32, 20)
    rec, vq_loss = model(x)
    loss = F.mse_loss(rec, x) / 0.8 + vq_loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, model.vq.ema_w, opt, losses))
