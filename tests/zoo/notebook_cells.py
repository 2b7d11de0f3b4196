import os

import torch
from bits import fingerprint
from torch import nn

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
