import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn
from torch.nn.utils import prune

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(11, 33), nn.ReLU(), nn.Dropout(0.5), nn.Linear(33, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
losses = []
for epoch in range(24 * times):
    if epoch == 12:
        prune.l1_unstructured(net[0], "weight", amount=0.4)
    x = torch.randn(20, 11)
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    w = net[3].weight.data
    norm = w.norm(2, dim=1, keepdim=True).clamp(min=0.5)
    net[3].weight.data = w * (norm.clamp(max=1.0) / norm)
    losses.append(loss.item())
prune.remove(net[0], "weight")
print("BITS", fingerprint(net, opt, losses))
