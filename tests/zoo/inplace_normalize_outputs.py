import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Tower(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.p = nn.Linear(i, 16)

    def forward(self, x):
        return self.p(x)


image_tower, text_tower = Tower(20), Tower(12)
logit_scale = nn.Parameter(torch.tensor(2.0))
params = [*image_tower.parameters(), *text_tower.parameters(), logit_scale]
opt = torch.optim.AdamW(params, lr=3e-3)
losses = []
for _ in range(20 * times):
    base = torch.randn(10, 12)
    img = torch.cat([base, torch.randn(10, 8)], 1)
    u, v = image_tower(img), text_tower(base)
    u.div_(u.detach().norm(dim=-1, keepdim=True))
    v.sub_(v.detach().mean(0)).mul_(0.5)
    sim = logit_scale.exp() * u @ F.normalize(v, dim=-1).t()
    loss = (F.cross_entropy(sim, torch.arange(10)) + F.cross_entropy(sim.t(), torch.arange(10))) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        logit_scale.clamp_(0, 4.6052)
    losses.append(loss.item())
print("BITS", fingerprint(image_tower, text_tower, logit_scale, opt, losses))
