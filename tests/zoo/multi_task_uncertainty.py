import hashlib
import os

import torch
import torch.nn.functional as F
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


class MultiTaskLoss(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        return sum(torch.exp(-s) * loss + s for s, loss in zip(self.log_vars, losses))


trunk = nn.Sequential(nn.Linear(14, 28), nn.ReLU())
heads = nn.ModuleDict({"cls": nn.Linear(28, 4), "reg": nn.Linear(28, 2)})
weigh = MultiTaskLoss(2)
opt = torch.optim.Adam(
    [{"params": trunk.parameters()}, {"params": heads.parameters()}, {"params": weigh.parameters(), "lr": 1e-2}],
    lr=2e-3,
)
log = []
for _ in range(22 * times):
    x = torch.randn(20, 14)
    h = trunk(x)
    parts = [F.cross_entropy(heads["cls"](h), x[:, :4].argmax(1)), F.mse_loss(heads["reg"](h), x[:, 4:6] ** 2)]
    loss = weigh(parts)
    opt.zero_grad()
    loss.backward()
    opt.step()
    log.append(loss.item())
print("BITS", fingerprint(trunk, heads, weigh, opt, log))
