import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))


LOSSES = {
    "multimargin": (nn.MultiMarginLoss(p=2), lambda n: torch.randint(0, 6, (n,))),
    "multilabel_margin": (
        nn.MultiLabelMarginLoss(),
        lambda n: torch.stack([torch.cat([torch.randperm(6)[:2], torch.full((4,), -1)]) for _ in range(n)]),
    ),
    "multilabel_soft": (nn.MultiLabelSoftMarginLoss(), lambda n: (torch.rand(n, 6) > 0.5).float()),
    "soft": (nn.SoftMarginLoss(), lambda n: torch.where(torch.rand(n, 6) > 0.5, 1.0, -1.0)),
}

results = []
for name, (criterion, labels) in LOSSES.items():
    net = nn.Sequential(nn.Linear(11, 22), nn.Hardswish(), nn.Linear(22, 6))
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    for _ in range(8):
        loss = criterion(net(torch.randn(18, 11)), labels(18))
        opt.zero_grad()
        loss.backward()
        opt.step()
        results.append(loss.item())
    results.append(fingerprint(net, opt))
print("BITS", fingerprint(results))
