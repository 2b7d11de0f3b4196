import os

import torch
from bits import fingerprint
from torch import nn
from torch.nn import HuberLoss, SmoothL1Loss

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class BoxHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 40), nn.LeakyReLU(0.1))
        self.box = nn.Linear(40, 4)
        self.angle = nn.Linear(40, 1)

    def forward(self, features):
        h = self.trunk(features)
        return self.box(h), self.angle(h)


net = BoxHead()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
smooth, huber = SmoothL1Loss(beta=0.5), HuberLoss(delta=2.0)
losses = []
for i in range(24 * times):
    f = torch.randn(32, 20)
    box_t, angle_t = f[:, :4] * 3, f[:, 4:5].atan()
    box, angle = net(f)
    loss = smooth(box, box_t) + 0.3 * huber(angle, angle_t)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(float(loss))
print("BITS", fingerprint(net, opt, losses))
