import copy
import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


net = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 3))
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
best, best_loss, losses = None, float("inf"), []
valid = torch.randn(40, 10)
for step in range(24 * times):
    x = torch.randn(16, 10)
    with torch.inference_mode():
        hard = net(x).softmax(1).amax(1).argsort()[:12]  # picks hard examples in train mode
    x = x[hard.clone()]
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    if step % 4 == 3:
        net.eval()
        with torch.no_grad():
            v = F.cross_entropy(net(valid), valid[:, :3].argmax(1)).item()
        net.train()
        losses.append(v)
        if v < best_loss:
            best, best_loss = copy.deepcopy(net), v
print("BITS", fingerprint(net, best, opt, losses))
