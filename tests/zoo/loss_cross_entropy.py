import hashlib
import os

import torch
from torch import nn

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
torch.manual_seed(SEED)


def fingerprint(*things):
    h = hashlib.sha256()

    def eat(x):
        if isinstance(x, torch.Tensor):
            x = x.detach()
            x = x.to_dense() if x.is_sparse else x
            h.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, nn.Module):
            eat(list(x.parameters()))
            eat(list(x.buffers()))
        elif isinstance(x, torch.optim.Optimizer):
            eat(x.state_dict()["state"])
        elif isinstance(x, dict):
            for k in x:
                eat(x[k])
        elif isinstance(x, (list, tuple)):
            for y in x:
                eat(y)
        else:
            h.update(x.hex().encode() if isinstance(x, float) else repr(x).encode())

    eat(things)
    return h.hexdigest()


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
