import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class MixerLayer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(nn.Linear(tokens, 12), nn.GELU(), nn.Linear(12, tokens))
        self.channel = nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim))

    def forward(self, x):
        x = x + self.token(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.n2(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 4, 4)
        self.layers = nn.ModuleList(MixerLayer(4, 12) for _ in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


net = Mixer()
groups = [{"params": net.stem.parameters(), "lr": 1e-4}]
groups += [{"params": layer.parameters(), "lr": 1e-3 * 0.8 ** (2 - i)} for i, layer in enumerate(net.layers)]
groups += [{"params": net.head.parameters(), "lr": 5e-3, "weight_decay": 0.0}]
opt = torch.optim.AdamW(groups, weight_decay=0.05)
warmup = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 6))
losses = []
for step in range(16 * times):
    x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    warmup.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
