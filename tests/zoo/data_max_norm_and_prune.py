import hashlib
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

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


net = nn.Sequential(nn.Linear(11, 33), nn.ReLU(), nn.Dropout(0.5), nn.Linear(33, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
losses = []
for epoch in range(24 * times):
    if epoch == 12:
        prune.l1_unstructured(net[0], "weight", amount=0.4)
    x = torch.randn(20, 11)
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    w = net[3].weight.data
    norm = w.norm(2, dim=1, keepdim=True).clamp(min=0.5)
    net[3].weight.data = w * (norm.clamp(max=1.0) / norm)
    losses.append(loss.item())
prune.remove(net[0], "weight")
print("BITS", fingerprint(net, opt, losses))
