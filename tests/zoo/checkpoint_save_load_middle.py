import os
import tempfile

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


model, opt = build()
losses = []
path = os.path.join(tempfile.mkdtemp(), "ckpt.pt")
for step in range(24 * times):
    if step == 12:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state()}, path)
        model, opt = build()
        ckpt = torch.load(path)
        model.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["opt"])
        torch.set_rng_state(ckpt["rng"])
    if step == 18:  # the run went bad: back to the checkpoint, in place
        model.load_state_dict(torch.load(path)["model"])
    x = torch.randn(16, 8)
    loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
os.remove(path)
print("BITS", fingerprint(model, opt, losses))
