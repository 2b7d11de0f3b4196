"""What the exact sensors add to a deep step: ``python bench/exact_cost.py [--ranks N] [--width W]``.

Trains ranks under DistributedDataParallel with activation checkpointing, every step deep, with and without the sensors
`collective` and `recompute`, by turns in one process, and prints medians of the processor time of a step and their ratios:
wall times say little where processors are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bitwitness import Guard

KINDS = {
    "without": {"collective": {"enabled": False}, "recompute": {"enabled": False}},
    "collective": {"recompute": {"enabled": False}},
    "recompute": {"collective": {"enabled": False}},
    "both": {},
}


class Net(nn.Module):
    """Blocks of two layers, each recomputed in the backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss of a batch [N, width]."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def steps(width: int, settings: dict[str, object] | None, count: int) -> list[float]:
    """Return the seconds of each step, guarded with every step deep; unguarded where there are no settings."""
    torch.manual_seed(0)
    net = DistributedDataParallel(Net(width))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    guard = None if settings is None else Guard(net, optimizer, deep_every=1, quiet=True, self_test=False, **settings)
    if guard is not None:
        guard.start()
    taken = []
    for _ in range(count):
        x = torch.randn(256, width)
        dist.barrier()
        began = time.process_time()
        net(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.process_time() - began)
    if guard is not None:
        guard.close()
    return taken


def measure(rank: int, ranks: int, width: int, port: int) -> None:
    """Be one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    taken: dict[str, list[float]] = {}
    for _ in range(2):
        for name, settings in {"unguarded": None, **KINDS}.items():
            # the steps at which a guard calibrates are left out
            taken.setdefault(name, []).extend(steps(width, settings, 9)[4:])
    if rank == 0:
        medians = {name: median(values) for name, values in taken.items()}
        print(json.dumps({name: round(value * 1e3, 2) for name, value in medians.items()} | {"unit": "ms"}))
        ratios = {name: round(medians[name] / medians["without"], 3) for name in ("collective", "recompute", "both")}
        print(json.dumps({"deep step against one without": ratios}))
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--port", type=int, default=29631)
    asked = parser.parse_args()
    mp.spawn(measure, (asked.ranks, asked.width, asked.port), asked.ranks)


if __name__ == "__main__":
    main()
