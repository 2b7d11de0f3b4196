"""Two trainings, each in a thread of its own; prints the hash of each one's weights: ``threads.py [TIMES]``."""

from __future__ import annotations

import sys
import threading

import torch
from torch import nn

from bitwitness.stats import bit_hash

STEPS = 30


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 1))


def train(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(32, 10, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


torch.set_num_threads(1)
if len(sys.argv) > 1:  # more trainings, in threads that take turns as often as can be
    sys.setswitchinterval(1e-5)
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
    torch.manual_seed(0)
    models = [build(), build()]
    threads = [threading.Thread(target=train, args=(model, number)) for number, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("BITS", *[sum(int(bit_hash(p.detach())) for p in model.parameters()) for model in models])
