import os
from collections import namedtuple
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


@dataclass
class Out:
    logits: torch.Tensor
    hidden: torch.Tensor
    loss: Optional[torch.Tensor] = None


Pair = namedtuple("Pair", "first second")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(9, 18), nn.Linear(18, 18)

    def forward(self, x):
        h = torch.relu(self.a(x))
        return Pair(h, torch.relu(self.b(h)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(18, 4)

    def forward(self, x, y=None):
        pair = self.encoder(x)
        logits = self.head(pair.second + pair.first)
        return Out(logits, pair.second, None if y is None else F.cross_entropy(logits, y))


model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
history = []
for step in range(24 * times):
    x, y = torch.randn(16, 9), torch.randint(0, 4, (16,))
    out = model(x, y if step % 2 else None)
    loss = out.loss if out.loss is not None else F.cross_entropy(out.logits, y)
    loss = loss + 1e-3 * out.hidden.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    history.append(loss.item())
print("BITS", fingerprint(model, opt, history))
