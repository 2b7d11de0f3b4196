import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from bits import fingerprint

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


encoder = nn.Sequential(nn.Linear(15, 30), nn.ReLU(), nn.Linear(30, 8))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
hinge = nn.HingeEmbeddingLoss(margin=1.0)
cosine = nn.CosineEmbeddingLoss(margin=0.2)
history = []
for epoch in range(20 * times):
    left, right = torch.randn(20, 15), torch.randn(20, 15)
    same = torch.where(torch.rand(20) > 0.5, 1.0, -1.0)
    right = torch.where(same[:, None] > 0, left + 0.1 * right, right)
    a, b = encoder(left), encoder(right)  # siamese: the same net twice
    d = F.pairwise_distance(a, b)
    loss = hinge(d, same) + cosine(a, b, same)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
print("BITS", fingerprint(encoder, optimizer, history))
