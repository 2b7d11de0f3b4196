import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


embed = nn.Sequential(nn.Conv1d(2, 8, 5, stride=2), nn.PReLU(), nn.Flatten(), nn.Linear(8 * 6, 10))
optimizer = torch.optim.RAdam(embed.parameters(), lr=1e-2)
triplet = nn.TripletMarginLoss(margin=1.0, p=2)
dist_triplet = nn.TripletMarginWithDistanceLoss(
    distance_function=lambda u, v: 1.0 - nn.functional.cosine_similarity(u, v), margin=0.3, swap=True
)
losses = []
for step in range(20 * times):
    anchor = torch.randn(10, 2, 16)
    positive = anchor + 0.05 * torch.randn_like(anchor)
    negative = torch.randn(10, 2, 16)
    ea, ep, en = embed(anchor), embed(positive), embed(negative)
    loss = triplet(ea, ep, en)
    if step >= 10:
        loss = loss + dist_triplet(ea, ep, en)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("BITS", fingerprint(embed, optimizer, losses))
