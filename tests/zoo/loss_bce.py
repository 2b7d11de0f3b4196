import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


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
