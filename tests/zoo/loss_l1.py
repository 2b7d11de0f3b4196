import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


# depth regression on toy images, with a validity mask
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1), nn.Softplus()
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
l1 = nn.L1Loss(reduction="none")
losses = []
for _ in range(20 * times):
    image = torch.rand(4, 3, 8, 8)
    depth = image.mean(1, keepdim=True) * 5
    valid = (torch.rand_like(depth) > 0.3).float()
    error = l1(model(image), depth)
    loss = (error * valid).sum() / valid.sum().clamp(min=1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("BITS", fingerprint(model, optimizer, losses))
