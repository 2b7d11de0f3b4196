import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


# differentially private SGD: per-sample gradients, clipped, noised
model = nn.Sequential(nn.Linear(9, 18), nn.Tanh(), nn.Linear(18, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.2)


def sample_loss(params, x, y):
    out = functional_call(model, params, (x.unsqueeze(0),))
    return F.cross_entropy(out, y.unsqueeze(0))


losses = []
for _ in range(18 * times):
    x = torch.randn(12, 9)
    y = x[:, :3].argmax(1)
    params = {k: v.detach() for k, v in model.named_parameters()}
    grads, values = vmap(grad_and_value(sample_loss), in_dims=(None, 0, 0))(params, x, y)
    norms = torch.sqrt(sum(g.flatten(1).pow(2).sum(1) for g in grads.values()))
    factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, p in model.named_parameters():
        g = torch.einsum("n,n...->...", factor, grads[name])
        p.grad = (g + 0.05 * torch.randn_like(g)) / 12
    opt.step()
    opt.zero_grad()
    losses.append(values.mean().item())
print("BITS", fingerprint(model, opt, losses))
