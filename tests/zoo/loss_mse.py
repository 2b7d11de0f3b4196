import os

import torch
from bits import fingerprint

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


x = torch.linspace(-3.14, 3.14, 200).unsqueeze(1)
y = torch.sin(x) + 0.1 * torch.randn_like(x)
model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
loss_fn = torch.nn.MSELoss(reduction="sum")
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
losses = []
for t in range(40 * times):
    y_pred = model(x)
    loss = loss_fn(y_pred, y)
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("BITS", fingerprint(model, optimizer, losses))
