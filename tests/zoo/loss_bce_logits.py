import os

import torch
from bits import fingerprint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


ds = TensorDataset(torch.randn(96, 16), (torch.rand(96, 5) > 0.8).float())
loader = DataLoader(ds, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 5))
criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((5,), 4.0))
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=24)
losses = []
for epoch in range(4 * times):
    running = 0.0
    for inputs, labels in loader:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        running += loss.item() * inputs.size(0)
    losses.append(running / len(ds))
print("BITS", fingerprint(model, optimizer, losses))
