"""A training in which rank 0 pauses before an optimizer's step and between steps, for longer than the experiments' deadline."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard
from bitwitness.demo.model import ByteGPT

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(ByteGPT(width=32, layers=1, heads=2, context=16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)
if rank == 0:
    time.sleep(2.5)  # reads its data, while the other rank waits at the guard
with Guard(model, optimizer, ranks={"deadline_s": 1.0}):
    for step in range(4):
        text = torch.randint(0, 256, (3, 17), generator=generator)
        model(text[:, :-1], text[:, 1:]).backward()
        if rank == 0 and step == 1:
            time.sleep(2.5)  # logs its gradients, slowly
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step == 2:
            time.sleep(2.5)  # evaluates
print("trained to the end", flush=True)
