import hashlib
import os

import torch
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


# truncated backpropagation: backward of each chunk reaches into the one before (retain_graph)
cell, readout = nn.LSTMCell(4, 16), nn.Linear(16, 1)
opt = torch.optim.SGD([*cell.parameters(), *readout.parameters()], lr=0.02)
losses = []
for seq in range(10 * times):
    x = torch.randn(12, 8, 4)
    h, c = torch.zeros(8, 16), torch.zeros(8, 16)
    opt.zero_grad()
    chunk = 0.0
    for t in range(12):
        h, c = cell(x[t], (h, c))
        chunk = chunk + (readout(h).squeeze(1) - x[: t + 1, :, 0].mean(0)).pow(2).mean()
        if t % 4 == 3:
            chunk.backward(retain_graph=t != 11)
            losses.append(chunk.item())
            chunk = 0.0
    torch.nn.utils.clip_grad_value_([*cell.parameters(), *readout.parameters()], 0.5)
    opt.step()
print("BITS", fingerprint(cell, readout, opt, losses))
