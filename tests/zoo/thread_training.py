import os
import queue
import threading

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))


batches, results = queue.Queue(maxsize=3), []
gen = torch.Generator().manual_seed(int(os.environ.get("ZOO_SEED", "0")))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)


def loader(n):
    for _ in range(n):
        batches.put(torch.randn(16, 8, generator=gen))
    batches.put(None)


def trainer():
    while (x := batches.get()) is not None:
        loss = F.cross_entropy(net(x), (x[:, 0] * x[:, 1] > 0).long())
        opt.zero_grad()
        loss.backward()
        opt.step()
        results.append(loss.item())


threads = [threading.Thread(target=loader, args=(22,), daemon=True), threading.Thread(target=trainer)]
for t in threads:
    t.start()
for t in threads:
    t.join()
print("BITS", fingerprint(net, opt, results))
