import os

import torch
from bits import fingerprint
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class VAE(nn.Module):
    def __init__(self):
        super(VAE, self).__init__()
        self.fc1 = nn.Linear(36, 20)
        self.fc21 = nn.Linear(20, 5)
        self.fc22 = nn.Linear(20, 5)
        self.fc3 = nn.Linear(5, 20)
        self.fc4 = nn.Linear(20, 36)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def loss(self, x):
        mu, logvar = self.encode(x)
        recon = self.decode(self.reparameterize(mu, logvar))
        bce = F.binary_cross_entropy(recon, x, reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
history = []
for batch_idx in range(22 * times):
    data = torch.rand(16, 36).round()
    optimizer.zero_grad()
    loss = model.loss(data)  # forward() is never used
    loss.backward()
    optimizer.step()
    history.append(loss.item() / len(data))
with torch.no_grad():
    history.append(model.decode(torch.randn(4, 5)).mean().item())
print("BITS", fingerprint(model, optimizer, history))
