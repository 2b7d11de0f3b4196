import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


model = nn.Sequential(nn.Linear(9, 18), nn.BatchNorm1d(18), nn.ReLU(), nn.Linear(18, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
swa, ema = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
swa_sched = SWALR(opt, swa_lr=0.05, anneal_epochs=4)
data = [torch.randn(16, 9) for _ in range(6)]
losses = []
for epoch in range(4 * times):
    for x in data:
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update_parameters(model)
        losses.append(loss.item())
    if epoch >= 1:
        swa.update_parameters(model)
        swa_sched.step()
update_bn(data, swa)
print("BITS", fingerprint(model, swa, ema, opt, losses))
