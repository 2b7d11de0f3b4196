import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
losses = []
for _ in range(16 * times):
    x, y = torch.rand(8, 1, 8, 8), torch.randint(0, 3, (8,))
    x.requires_grad = True
    # "free" adversarial training: the attack's backward leaves its gradients in the parameters, they count too
    opt.zero_grad()
    clean = F.cross_entropy(model(x), y)
    clean.backward()
    adv = (x + 0.03 * x.grad.data.sign()).clamp(0, 1).detach()
    loss = F.cross_entropy(model(adv), y)
    loss.backward()
    for p in model.parameters():
        p.grad /= 2
    opt.step()
    losses += [clean.item(), loss.item()]
print("BITS", fingerprint(model, opt, losses))
