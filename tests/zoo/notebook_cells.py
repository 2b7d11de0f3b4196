import hashlib
import os

import torch
from torch import nn


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


# a notebook, exported: each cell is compiled and run in one namespace, cells are run again
CELLS = [
    """
import torch.nn.functional as F
torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
""",
    """
for _ in range(8):
    x = torch.randn(16, 8)
    loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
    opt.zero_grad(); loss.backward(); opt.step()
    losses.append(loss.item())
""",
    """
model.eval(); acc = (model(x).argmax(1) == x[:, :3].argmax(1)).float().mean().item(); model.train()
losses.append(acc)
""",
    """
opt = torch.optim.SGD(model.parameters(), lr=0.05)
model[2] = nn.Linear(16, 3)
""",
]
space = {"torch": torch, "nn": nn, "os": os}
for number in (0, 1, 2, 1, 3, 1, 2, 0, 1):  # the last cells start afresh
    exec(compile(CELLS[number], f"<cell {number}>", "exec"), space)
print("BITS", fingerprint(space["model"], space["opt"], space["losses"]))
