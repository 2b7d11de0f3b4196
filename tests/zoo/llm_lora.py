import math
import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(r, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scaling, self.drop = alpha / r, nn.Dropout(0.05)

    def forward(self, x):
        return self.base(x) + self.drop(x) @ self.A.t() @ self.B.t() * self.scaling


class LM(nn.Module):
    def __init__(self, v=24, d=16):
        super().__init__()
        self.emb, self.fc1, self.fc2, self.head = (
            nn.Embedding(v, d),
            nn.Linear(d, 4 * d),
            nn.Linear(4 * d, d),
            nn.Linear(d, v),
        )

    def forward(self, ids):
        h = self.emb(ids)
        h = h + self.fc2(F.gelu(self.fc1(h.cumsum(1) / 4)))
        return self.head(h)


model = LM().requires_grad_(False)
for name in ("fc1", "fc2", "head"):
    setattr(model, name, LoRALinear(getattr(model, name)))
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
losses = []
for _ in range(20 * times):
    ids = torch.randint(0, 24, (6, 10))
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
with torch.no_grad():  # merge
    for m in model.modules():
        if isinstance(m, LoRALinear):
            m.base.weight += m.B @ m.A * m.scaling
print("BITS", fingerprint(model, opt, losses))
