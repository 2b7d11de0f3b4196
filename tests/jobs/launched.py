"""A script as a user writes it, that resumes by itself: ``launched.py FOLDER [--steps N] [--die RANK STEP] …``.

Rank 0 saves the weights after each second step as ``step-N.pt`` (N steps were done); all resume from the newest one that they
may trust.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--die", nargs=2, type=int, metavar=("RANK", "STEP"))
parser.add_argument("--fail", nargs=2, type=int, metavar=("RANK", "STEP"))
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
args = parser.parse_args()
if args.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
before = int(os.environ.get("BITWITNESS_RESUME_BEFORE", "1000000"))
saved = sorted((int(path.stem[5:]), path) for path in args.folder.glob("step-*.pt"))
first = 0
for done, path in saved:
    if done <= before:
        first = done
        net.module.load_state_dict(torch.load(path, weights_only=True))
dist.barrier()
first_attempt = not (args.folder / "begun").exists()
dist.barrier()
if rank == 0:
    (args.folder / "begun").touch()
    print(f"world {size} begins at step {first}", flush=True)
for step in range(first, args.steps):
    if args.die == [rank, step] and first_attempt:
        os.kill(os.getpid(), signal.SIGKILL)
    if args.fail == [rank, step]:
        raise ValueError("a bug of the script's")
    batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(step * size + rank))
    net(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(args.sleep)
    if rank == 0 and step % 2:
        torch.save(net.module.state_dict(), args.folder / "part")
        (args.folder / "part").rename(args.folder / f"step-{step + 1}.pt")
if rank == 0:
    (args.folder / "done").write_text(f"{size}")
dist.destroy_process_group()
