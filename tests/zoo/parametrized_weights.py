import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Symmetric(nn.Module):
    def forward(self, X):
        return X.triu() + X.triu(1).transpose(-1, -2)


net = nn.Sequential(
    weight_norm(nn.Linear(12, 16)),
    nn.ReLU(),
    spectral_norm(nn.Linear(16, 16)),
    nn.ReLU(),
    orthogonal(nn.Linear(16, 16)),
    nn.Linear(16, 16),
    nn.Linear(16, 3),
)
torch.nn.utils.parametrize.register_parametrization(net[5], "weight", Symmetric())
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
losses = []
for _ in range(18 * times):
    x = torch.randn(20, 12)
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
