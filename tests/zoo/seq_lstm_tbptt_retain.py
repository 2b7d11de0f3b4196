import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


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
