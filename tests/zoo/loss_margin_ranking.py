import hashlib
import os
import random

import torch
from torch import nn

seed = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
random.seed(seed)
torch.manual_seed(seed)


def digest(model, optimizer, losses):
    sha = hashlib.sha256()
    tensors = list(model.parameters()) + list(model.buffers())
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if torch.is_tensor(v)]
    for t in tensors:
        sha.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    sha.update(" ".join(float(v).hex() for v in losses).encode())
    return sha.hexdigest()


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
print("BITS", digest(ranker, optim, curve))
