import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {n: p.data.clone() for n, p in model.named_parameters()}
        self.backup = {}

    def update(self):
        for n, p in self.model.named_parameters():
            self.shadow[n] = self.decay * self.shadow[n] + (1 - self.decay) * p.data

    def apply_shadow(self):
        for n, p in self.model.named_parameters():
            self.backup[n] = p.data
            p.data = self.shadow[n]

    def restore(self):
        for n, p in self.model.named_parameters():
            p.data = self.backup[n]
        self.backup = {}


model = nn.Sequential(nn.Linear(9, 27), nn.ReLU(), nn.Linear(27, 3))
ema = EMA(model, 0.9)
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
val_x = torch.randn(64, 9)
log = []
for step in range(25 * times):
    x = torch.randn(16, 9)
    loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.update()
    log.append(loss.item())
    if step % 6 == 5:
        ema.apply_shadow()
        model.eval()
        with torch.no_grad():
            log.append(F.cross_entropy(model(val_x), val_x[:, :3].argmax(1)).item())
        model.train()
        ema.restore()
print("BITS", fingerprint(model, opt, ema.shadow, log))
