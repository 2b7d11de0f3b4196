"""Three processes train one model that lies in shared memory (Hogwild), each under a guard of its own; prints a line each."""

from __future__ import annotations

import json
import os

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

from bitwitness import Guard


class Net(nn.Module):
    """What reads its weights in all ways: by index, by convolution, by product."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.norm = nn.GroupNorm(4, 64)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, T] to scores [B, 50]."""
        hidden = functional.gelu(self.norm(self.conv(self.embed(tokens).transpose(1, 2))))
        scores: torch.Tensor = self.head(hidden.mean(2))
        return scores


def train(number: int, model: Net) -> None:
    """Train; the others write the same weights meanwhile."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Guard(model, optimizer, deep_every=1, quiet=True) as guard:
        for _ in range(24):
            tokens = torch.randint(0, 500, (16, 32))
            optimizer.zero_grad()
            functional.cross_entropy(model(tokens), tokens[:, 0] % 50).backward()
            optimizer.step()
    told = {
        "verdicts": [str(v.cause) for v in guard.verdicts],
        "findings": [f.sensor for f in guard.findings],
        "failures": guard.reporter.failures,
        "not_covered": guard.coverage()["not_covered"],
    }
    os.write(1, (json.dumps(told) + "\n").encode())  # in one piece: the others write to the same pipe


if __name__ == "__main__":
    torch.manual_seed(0)
    shared = Net().share_memory()
    mp.spawn(train, args=(shared,), nprocs=3)
