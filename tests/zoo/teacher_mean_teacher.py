import copy
import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


student = nn.Sequential(nn.Linear(10, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Dropout(0.3), nn.Linear(30, 4))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.detach_()
opt = torch.optim.Adam(student.parameters(), lr=3e-3)


def update_ema(alpha, global_step):
    alpha = min(1 - 1 / (global_step + 1), alpha)
    for e, p in zip(teacher.parameters(), student.parameters()):
        e.data.mul_(alpha).add_(p.data, alpha=1 - alpha)


log = []
for step in range(22 * times):
    labelled, unlabelled = torch.randn(12, 10), torch.randn(24, 10)
    target = labelled[:, :4].argmax(1)
    x = torch.cat([labelled, unlabelled])
    s = student(x + 0.1 * torch.randn_like(x))
    t = teacher(x + 0.1 * torch.randn_like(x)).detach()
    w = 5.0 * min(1.0, step / 15)
    loss = F.cross_entropy(s[:12], target) + w * F.mse_loss(s.softmax(1), t.softmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    update_ema(0.95, step)
    log.append(loss.item())
print("BITS", fingerprint(student, teacher, opt, log))
