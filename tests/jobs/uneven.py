"""Ranks with different numbers of batches, in ``join()``: ``uneven.py KIND``; prints a JSON line, plain and guarded."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, suppress

import torch
import torch.distributed as dist
from scenarios import fingerprint
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard

KIND = sys.argv[1]
SETTINGS = {
    "trend": {"z": 1e-9, "warmup": 1},
    "replay": {"rest": False},
    "ranks": {"deadline_s": 8.0},
    "self_test": False,
}


def build(zero: bool) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))
    if zero:
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    if KIND == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.01)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(guarded: bool) -> tuple[list, Guard | None]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    model, optimizer = build(KIND == "zero")
    guard = Guard(model, optimizer, **SETTINGS) if guarded else None
    lines: list[list] = []

    def step() -> None:
        x, y = torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lines.append([float(loss.detach()), fingerprint(model.parameters())])

    def epoch(batches: int) -> None:
        throws = KIND == "throw"
        context = Join([model, optimizer]) if KIND == "zero" else model.join(throw_on_early_termination=throws)
        with suppress(RuntimeError) if KIND == "throw" else nullcontext(), context:
            for _ in range(batches):
                step()

    def even(batches: int) -> None:
        model._join_config = type(model._join_config).construct_disabled_join_config()
        for _ in range(batches):
            step()

    with guard or nullcontext():
        even(3)
        epoch(3 + 4 * rank)
        even(5)
        epoch(2 if rank else 0)
        even(5)
    return lines, guard


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain, _ = train(guarded=False)
    watched, guard = train(guarded=True)
    table = guard.coverage()
    mine = {
        "same": plain == watched,
        "steps": len(plain),
        "now": guard.watch.uneven.now,
        "step": guard.session.step,
        **{name: table[name] for name in ("suspicions", "verdicts", "failures", "not_covered")},
        "held": table["steps"]["held"],
    }
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        print(json.dumps({"kind": KIND, "ranks": everyone}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
