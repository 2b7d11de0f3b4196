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


net = nn.Sequential(
    nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(12), nn.ReLU(), nn.LazyLinear(3)
)
net(torch.zeros(2, 1, 6, 6))  # dry run: makes the parameters
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
# a second dry run, with backward, to see that it fits in memory
F.cross_entropy(net(torch.randn(4, 1, 6, 6)), torch.zeros(4, dtype=torch.long)).backward()
opt.zero_grad()
losses = []
for _ in range(16 * times):
    x = torch.randn(8, 1, 6, 6)
    loss = F.cross_entropy(net(x), torch.randint(0, 3, (8,)))
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
print("BITS", digest(net, opt, losses))
