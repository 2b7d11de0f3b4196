import os
import random

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
random.seed(SEED)
torch.manual_seed(SEED)


class SkipGram(nn.Module):
    def __init__(self, v, d):
        super().__init__()
        self.center = nn.Embedding(v, d)
        self.context = nn.EmbeddingBag(v, d, mode="sum")
        self.context.weight.data.zero_()

    def forward(self, c, pos, neg):
        vc = self.center(c)
        pos_score = F.logsigmoid((vc * self.context(pos[:, None])).sum(1))
        vn = F.embedding(neg, self.context.weight)
        neg_score = F.logsigmoid(-(vn @ vc.unsqueeze(2)).squeeze(2)).sum(1)
        return -(pos_score + neg_score).mean()


words = [random.randrange(35) for _ in range(800)]
model = SkipGram(35, 10)
opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
losses = []
for _ in range(25 * times):
    at = [random.randrange(2, 798) for _ in range(24)]
    c = torch.tensor([words[a] for a in at])
    pos = torch.tensor([words[a + random.choice([-2, -1, 1, 2])] for a in at])
    loss = model(c, pos, torch.randint(0, 35, (24, 4)))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
