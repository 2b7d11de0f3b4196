import hashlib
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


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


clf = nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.2), nn.ELU(), nn.Linear(24, 1), nn.Sigmoid())
opt = torch.optim.Adagrad(clf.parameters(), lr=0.05)
bce = nn.BCELoss()
X = torch.randn(128, 12)
Y = (X[:, :3].sum(1, keepdim=True) > 0).float()
losses = []
for epoch in range(5 * times):
    for idx in torch.randperm(128).split(32):
        p = clf(X[idx])
        loss = bce(p, Y[idx])
        opt.zero_grad(set_to_none=False)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    clf.eval()
    with torch.no_grad():
        acc = ((clf(X) > 0.5).float() == Y).float().mean().item()
    losses.append(acc)
    clf.train()
print("BITS", fingerprint(clf, opt, losses))
