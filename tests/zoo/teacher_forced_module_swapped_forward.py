import functools
import os
import types

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def log_calls(record, forward):
    @functools.wraps(forward)
    def wrapped(*args, **kwargs):
        out = forward(*args, **kwargs)
        record.append(out.detach().abs().mean().item())
        return out

    return wrapped


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(9, 18), nn.Linear(18, 3)

    def forward(self, x, **kwargs):
        return self.fc2(F.relu(self.fc1(x))) / kwargs.get("temperature", 1.0)


def new_forward(self, x, **kwargs):
    return self.fc2(F.gelu(self.fc1(x))) / kwargs.get("temperature", 1.0)


net, record = Net(), []
net.fc1.forward = log_calls(record, net.fc1.forward)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
losses = []
for step in range(24 * times):
    if step == 8:
        net.forward = types.MethodType(new_forward, net)  # monkey-patched instance
    if step == 16:
        Net.forward = new_forward  # and class
        del net.forward
    x = torch.randn(16, 9)
    loss = F.cross_entropy(net(x, temperature=1.0 + step / 10), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses + record))
