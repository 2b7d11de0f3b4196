import os
import random

import torch
from bits import fingerprint
from torch import nn

seed = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
random.seed(seed)
torch.manual_seed(seed)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(9, 18)
        self.fc2 = nn.Linear(18, 1)

    def forward(self, doc):
        return self.fc2(torch.relu(self.fc1(doc))).squeeze(-1)


ranker = Ranker()
optim = torch.optim.Adam(ranker.parameters(), 3e-3)
rank_loss = nn.MarginRankingLoss(margin=0.5)
truth = torch.randn(9)
docs = [torch.randn(9) for _ in range(60)]
curve = []
for _ in range(30 * times):
    pairs = [random.sample(docs, 2) for _ in range(16)]
    a = torch.stack([p[0] for p in pairs])
    b = torch.stack([p[1] for p in pairs])
    target = torch.sign(a @ truth - b @ truth)
    loss = rank_loss(ranker(a), ranker(b), target)
    optim.zero_grad()
    loss.backward()
    optim.step()
    curve.append(loss.item())
print("BITS", fingerprint(ranker, optim, curve))
