"""A training that somebody watches from outside: rank 2 computes steps 6 and 7 wrongly; it goes on until it is told to end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from scenarios import OPTIMIZERS, loss_of, seeded
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard
from bitwitness.testing import FaultyDevice, contained, from_mapping

FAULT = {
    "site": "layers.1.mlp.up/addmm:forward",
    "rank": 2,
    "steps": [6, 7],
    "element": 5,
    "pattern": "column",
    "kind": "multiply",
    "factor": 1e4,
}


@contained()
def main(out: str, config: str, end: Path, most_s: float = 120.0) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, until = dist.get_rank(), time.monotonic() + most_s
    model = DistributedDataParallel(seeded("gpt"))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    generator = torch.Generator().manual_seed(7 + rank)
    over = torch.zeros(1)
    with (
        FaultyDevice(from_mapping({"fault": [FAULT]}), rank=rank, seed=rank),
        Guard(model, optimizer, out=out, config=config, act="observe", deep_every=4, trend={"warmup": 3}),
    ):
        step = 0
        while not over:
            loss_of("gpt", model, generator, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step > 8:
                time.sleep(0.1)
            over.fill_(end.exists() or time.monotonic() > until)
            dist.all_reduce(over)
    time.sleep(0.2)  # gloo's threads let go of the last exchange before the interpreter ends
    dist.destroy_process_group()


main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
