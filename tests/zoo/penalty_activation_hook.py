import hashlib
import os

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def fingerprint(*things):
    h = hashlib.sha256()

    def eat(x):
        if isinstance(x, torch.Tensor):
            x = x.detach()
            x = x.to_dense() if x.is_sparse else x
            h.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, nn.Module):
            eat(list(x.parameters()))
            eat(list(x.buffers()))
        elif isinstance(x, torch.optim.Optimizer):
            eat(x.state_dict()["state"])
        elif isinstance(x, dict):
            for k in x:
                eat(x[k])
        elif isinstance(x, (list, tuple)):
            for y in x:
                eat(y)
        else:
            h.update(x.hex().encode() if isinstance(x, float) else repr(x).encode())

    eat(things)
    return h.hexdigest()


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
