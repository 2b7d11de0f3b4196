import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


# GradNorm: the tasks' weights are trained on the norms of the shared layer's gradients
shared, a, b = nn.Linear(10, 20), nn.Linear(20, 3), nn.Linear(20, 1)
weights = nn.Parameter(torch.ones(2))
opt = torch.optim.Adam([*shared.parameters(), *a.parameters(), *b.parameters()], lr=2e-3)
w_opt = torch.optim.SGD([weights], lr=0.02)
first, log = None, []
for step in range(16 * times):
    x = torch.randn(24, 10)
    h = torch.relu(shared(x))
    tasks = torch.stack([F.cross_entropy(a(h), x[:, :3].argmax(1)), F.mse_loss(b(h), x.prod(1, keepdim=True))])
    first = tasks.detach() if first is None else first
    loss = (weights * tasks).sum()
    opt.zero_grad()
    loss.backward(retain_graph=True)
    weights.grad.zero_()
    norms = torch.stack(
        [
            torch.autograd.grad(w * t, shared.weight, retain_graph=True, create_graph=True)[0].norm()
            for w, t in zip(weights, tasks)
        ]
    )
    ratio = tasks.detach() / first
    target = (norms.mean() * (ratio / ratio.mean()) ** 1.5).detach()
    weights.grad = torch.autograd.grad((norms - target).abs().sum(), weights)[0]
    w_opt.step()
    opt.step()
    weights.data = weights.data * 2 / weights.data.sum()
    log += [loss.item(), weights.tolist()]
print("BITS", fingerprint(shared, a, b, weights, opt, log))
