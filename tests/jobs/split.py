"""One training whose batch is split over ranks and micro-batches, recorded: ``python split.py FOLDER RUN …``.

A run is a dtype, a dash, the number of micro-batches, a dash and what is wrong: ``right``, ``summed`` (gradients are added up
over ranks, and not averaged), ``undivided`` (losses are not divided by the number of micro-batches), ``row`` (one gradient is
1.3 times as large).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import bitwitness as bw


def train(folder: Path, run: str) -> None:
    """Train two steps on this rank's part of each batch of eight."""
    dtype, number, wrong = run.split("-")
    micros, world = int(number), dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 20))
    model = nn.parallel.DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=folder / f"{world}-{run}"):
        for _ in range(2):
            x = torch.randint(0, 20, (8, 6), generator=generator)
            for part in x[rank * 8 // world : (rank + 1) * 8 // world].chunk(micros):
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                    loss = F.cross_entropy(model(part).flatten(0, 1), part.roll(-1, 1).flatten())
                (loss / (1 if wrong == "undivided" else micros)).backward()
            for p in net.parameters():
                p.grad *= world if wrong == "summed" else 1
            net[1].weight.grad *= 1.3 if wrong == "row" else 1
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for run in sys.argv[2:]:
        train(Path(sys.argv[1]), run)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
