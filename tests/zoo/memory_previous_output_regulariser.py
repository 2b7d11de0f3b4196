import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


# temporal ensembling: targets are a running average of the model's own outputs, changed in place
n = 40
net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
X = torch.randn(n, 8)
Y = X[:, :3].argmax(1)
labelled = torch.rand(n) < 0.3
Z, z = torch.zeros(n, 3), torch.zeros(n, 3)
losses = []
for epoch in range(8 * times):
    outputs = torch.zeros(n, 3)
    for idx in torch.randperm(n).split(14):
        out = net(X[idx])
        outputs[idx] = out.data
        sup = F.cross_entropy(out, Y[idx], reduction="none")[labelled[idx]].sum() / 14
        cons = F.mse_loss(out.softmax(1), z[idx])
        loss = sup + min(1.0, epoch / 4) * 3 * cons
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    Z.mul_(0.6).add_(outputs.softmax(1), alpha=0.4)
    z = Z / (1 - 0.6 ** (epoch + 1))
print("BITS", fingerprint(net, opt, losses))
