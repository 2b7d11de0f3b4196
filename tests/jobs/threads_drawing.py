"""Two trainings in two threads, of which one alone draws from the global generators: its numbers are the same each time."""

from __future__ import annotations

import threading

import torch
from torch import nn

from bitwitness.stats import bit_hash

STEPS = 25


def train(model: nn.Module, batches: torch.Tensor | None) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(STEPS):
        x = torch.randn(16, 8) if batches is None else batches[step]
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


torch.set_num_threads(1)
torch.manual_seed(0)
batches = torch.randn(STEPS, 16, 8)
models = [
    nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)),
    nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 8)),
]
threads = [threading.Thread(target=train, args=pair) for pair in zip(models, (batches, None), strict=True)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("BITS", *[sum(int(bit_hash(p.detach())) for p in model.parameters()) for model in models])
