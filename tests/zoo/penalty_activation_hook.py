import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


# sparse autoencoder-like: the hidden activations are collected by forward hooks and punished
activations = []
net = nn.Sequential(nn.Linear(18, 36), nn.ReLU(), nn.Linear(36, 36), nn.ReLU(), nn.Linear(36, 18))
for layer in net:
    if isinstance(layer, nn.ReLU):
        layer.register_forward_hook(lambda mod, inp, out: activations.append(out))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
losses = []
for step in range(25 * times):
    activations.clear()
    x = torch.randn(16, 18)
    rec = F.mse_loss(net(x), x)
    sparsity = torch.stack([a.abs().mean() for a in activations]).sum()
    loss = rec + 0.01 * sparsity
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append([rec.item(), sparsity.item()])
print("BITS", fingerprint(net, opt, losses))
