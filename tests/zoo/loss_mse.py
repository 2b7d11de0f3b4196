import hashlib
import os

import torch

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
print("BITS", digest(model, optimizer, losses))
