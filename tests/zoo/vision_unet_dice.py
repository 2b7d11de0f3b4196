import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def double(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1),
        nn.InstanceNorm2d(o, affine=True),
        nn.ReLU(inplace=True),
        nn.Conv2d(o, o, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2, self.mid = double(1, 4), double(4, 8), double(8, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.u1, self.out = double(16, 8), nn.Conv2d(8 + 4, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.mid(F.max_pool2d(b, 2))
        c = self.u1(torch.cat([self.up(c), b], 1))
        c = F.interpolate(c, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(torch.cat([c, a], 1))


def dice_loss(logits, target, eps=1.0):
    p = logits.sigmoid().flatten(1)
    t = target.flatten(1)
    return (1 - (2 * (p * t).sum(1) + eps) / (p.sum(1) + t.sum(1) + eps)).mean()


net = UNet()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
losses = []
for _ in range(12 * times):
    img = torch.randn(4, 1, 12, 12)
    mask = (F.avg_pool2d(img, 3, 1, 1) > 0.1).float()
    logits = net(img)
    loss = dice_loss(logits, mask) + F.binary_cross_entropy_with_logits(logits, mask)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
