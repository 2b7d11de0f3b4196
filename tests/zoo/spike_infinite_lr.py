import hashlib
import os

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def digest(model, optimizer, losses):
    sha = hashlib.sha256()
    tensors = list(model.parameters()) + list(model.buffers())
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if torch.is_tensor(v)]
    for t in tensors:
        sha.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    sha.update(" ".join(float(v).hex() for v in losses).encode())
    return sha.hexdigest()


net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
losses = []
good = {k: v.clone() for k, v in net.state_dict().items()}
for step in range(24 * times):
    warm = max(0, 12 - step) if step != 12 else 0
    opt.param_groups[0]["lr"] = 0.05 / warm if warm else (float("inf") if step == 12 else 0.05)  # off by one
    x = torch.randn(16, 5)
    loss = F.mse_loss(net(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    if not all(torch.isfinite(p).all() for p in net.parameters()):
        net.load_state_dict(good)
    good = {k: v.clone() for k, v in net.state_dict().items()}
print("BITS", digest(net, opt, losses))
