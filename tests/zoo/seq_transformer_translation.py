import math
import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class NoamOpt:
    def __init__(self, size, warmup, optimizer):
        self.optimizer, self._step, self.warmup, self.size = optimizer, 0, warmup, size

    def step(self):
        self._step += 1
        rate = self.size**-0.5 * min(self._step**-0.5, self._step * self.warmup**-1.5)
        for p in self.optimizer.param_groups:
            p["lr"] = rate
        self.optimizer.step()


class Translator(nn.Module):
    def __init__(self, v=20, d=16):
        super().__init__()
        self.src, self.tgt = nn.Embedding(v, d), nn.Embedding(v, d)
        self.core = nn.Transformer(d, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.gen = nn.Linear(d, v)
        self.scale = math.sqrt(d)

    def forward(self, s, t):
        mask = nn.Transformer.generate_square_subsequent_mask(t.size(1))
        y = self.core(self.src(s) * self.scale, self.tgt(t) * self.scale, tgt_mask=mask, src_key_padding_mask=s == 0)
        return self.gen(y)


model = Translator()
opt = NoamOpt(16, 20, torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0, reduction="sum")
losses = []
for _ in range(15 * times):
    s = torch.randint(1, 20, (6, 8))
    s[:2, 6:] = 0
    t = s.flip(1)
    out = model(s, t[:, :-1])
    tokens = (t[:, 1:] != 0).sum()
    loss = criterion(out.reshape(-1, 20), t[:, 1:].reshape(-1)) / tokens
    loss.backward()
    opt.step()
    opt.optimizer.zero_grad()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt.optimizer, losses))
