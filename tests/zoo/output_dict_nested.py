import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class MultiScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Conv2d(2, 6, 3, 2, 1)
        self.down2 = nn.Conv2d(6, 10, 3, 2, 1)
        self.heads = nn.ModuleDict({"p1": nn.Conv2d(6, 3, 1), "p2": nn.Conv2d(10, 3, 1)})

    def forward(self, batch):
        f1 = F.relu(self.down1(batch["image"]))
        f2 = F.relu(self.down2(f1))
        return {"maps": {"p1": self.heads["p1"](f1), "p2": self.heads["p2"](f2)}, "meta": ["v1", None, 3]}


net = MultiScale()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
losses = []
for _ in range(15 * times):
    batch = {"image": torch.randn(4, 2, 8, 8), "mask": torch.randint(0, 3, (4, 8, 8)), "id": ["a", "b", "c", "d"]}
    out = net(batch)
    loss = 0
    for key, weight in (("p1", 1.0), ("p2", 0.5)):
        m = out["maps"][key]
        t = F.interpolate(batch["mask"][:, None].float(), size=m.shape[-2:]).long()[:, 0]
        loss += weight * F.cross_entropy(m, t)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
