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


net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for step in range(28 * times):
    x = torch.randn(12, 8)
    out = net(x)
    net.zero_grad()  # between forward and backward
    loss = F.mse_loss(out, x[:, :2])
    loss.backward()
    if step % 7 == 3:
        net.zero_grad(set_to_none=False)  # this batch is not to count
        losses.append(loss.item())
    opt.step()
    if step % 5 == 0:
        for p in net.parameters():
            p.grad = None
    losses.append(loss.item())
print("BITS", digest(net, opt, losses))
