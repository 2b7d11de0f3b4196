import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


teacher = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 6)).eval()
for p in teacher.parameters():
    p.requires_grad_(False)
student = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 6))
kl = nn.KLDivLoss(reduction="batchmean", log_target=False)
opt = torch.optim.Adam(student.parameters(), lr=5e-3)
T = 3.0
losses = []
for it in range(25 * times):
    x = torch.randn(24, 10)
    with torch.no_grad():
        soft = F.softmax(teacher(x) / T, dim=-1)
    s = student(x)
    loss = kl(F.log_softmax(s / T, dim=-1), soft) * T * T + 0.1 * F.cross_entropy(s, soft.argmax(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(student, teacher, opt, losses))
