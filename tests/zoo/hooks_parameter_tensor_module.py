import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))
seen = []
net[0].weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
net[2].bias.register_hook(lambda g: g * 2.0)
net[2].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].norm().item()))
net[1].register_forward_pre_hook(lambda m, inp: (inp[0] + 0.1,))
net[4].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.abs().max().item()))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for _ in range(20 * times):
    x = torch.randn(16, 10)
    out = net(x)
    out.register_hook(lambda g: g - g.mean())
    out.retain_grad()
    loss = F.cross_entropy(out, x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    seen.append(out.grad.norm().item())
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses, seen))
