import os

import torch
from bits import fingerprint
from torch import nn

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
torch.manual_seed(SEED)


model = nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
weights = torch.rand(50) + 0.5
criterion = nn.CrossEntropyLoss(weight=weights, ignore_index=-100, label_smoothing=0.1)
losses = []
for step in range(30 * times):
    tokens = torch.randint(0, 50, (8, 12))
    labels = tokens.roll(-1, dims=1).clone()
    labels[:, -1] = -100
    logits = model(tokens)
    loss = criterion(logits.view(-1, 50), labels.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, optimizer, losses))
