import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


backbone = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
head = nn.Linear(24, 4)
model = nn.Sequential(backbone, head)
for p in backbone.parameters():
    p.requires_grad = False
opt = torch.optim.Adam(head.parameters(), lr=5e-3)
losses = []
for epoch in range(24 * times):
    if epoch == 8:
        for p in backbone[3].parameters():
            p.requires_grad = True
        opt.add_param_group({"params": backbone[3].parameters(), "lr": 1e-3})
    if epoch == 16:
        rest = [p for p in backbone.parameters() if not p.requires_grad]
        for p in rest:
            p.requires_grad_(True)
        opt.add_param_group({"params": rest, "lr": 5e-4})
    model.train()
    if epoch < 16:
        backbone[1].eval()
    x = torch.randn(20, 12)
    loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
