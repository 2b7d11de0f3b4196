"""Trainings on two ranks whose wrapper is made after their model has run; each once plain and once under guard."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Wrapped

from bitwitness.config import load_config
from bitwitness.guard.auto import AutoGuard
from bitwitness.ranks.process_groups import wrapped_later
from bitwitness.stats import bit_hash
from bitwitness.tap.modules import unwrap


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Outer(nn.Module):
    """A module around the wrapper."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Linear(2, 2)

    def forward(self, x):
        return self.scale(self.inner(x))


def data():
    return torch.ones(3, 4) * (1 + dist.get_rank())


def steps(call, *owners, count: int = 5) -> None:
    optimizer = torch.optim.SGD([p for owner in owners for p in owner.parameters()], lr=0.1)
    for _ in range(count):
        call(data()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def dry_run():
    net = Net()
    net(data())
    net = Wrapped(net)
    steps(net, net)
    return [net]


def dry_run_on_one_rank():
    net = Net()
    if dist.get_rank() == 0:
        net(data()).sum().backward()
        net.zero_grad()
    net = Wrapped(net)
    steps(net, net)
    return [net]


def lazy():
    net = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2))
    net(data())
    net = Wrapped(net)
    steps(net, net)
    return [net]


def dry_run_of_the_raw_module_later():
    raw = Net()
    raw(data())
    net = Wrapped(raw)
    if dist.get_rank() == 0:
        raw(data())
    steps(net, net)
    return [net]


def one_of_two():
    first, second = Net().requires_grad_(False), nn.Linear(2, 2)
    second(first(data()))
    second = Wrapped(second)
    steps(lambda x: second(first(x)), second)
    return [second]


def around_a_part():
    net = Net()
    net(data())
    net.body = Wrapped(net.body)
    net.head.requires_grad_(False)
    steps(net, net.body)
    return [net.body]


def inside_another():
    net = Outer(Wrapped(Net()))
    net.scale.requires_grad_(False)
    steps(net, net.inner)
    return [net.inner]


def trains_before():
    net = Net()
    steps(net, net, count=3)
    net = Wrapped(net)
    steps(net, net)
    return [net]


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = Net()
    net(data())
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net.body, mesh=mesh)
    fully_shard(net, mesh=mesh)
    steps(net, net)
    return [net]


JOBS = {
    "dry run": dry_run,
    "dry run on one rank": dry_run_on_one_rank,
    "lazy": lazy,
    "dry run later": dry_run_of_the_raw_module_later,
    "one of two": one_of_two,
    "around a part": around_a_part,
    "inside another": inside_another,
    "trains before": trains_before,
    "sharded": sharded,
}


def bits(models) -> list[int]:
    values = [value.detach() for model in models for value in model.parameters()]
    return [int(bit_hash(value.to_local() if hasattr(value, "to_local") else value)) for value in values]


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, job in JOBS.items():
        results = []
        folder = out / name
        for guarded in (False, True):
            torch.manual_seed(3)
            settings = {"self_test": False, "out": str(folder / "run")}
            found = AutoGuard(load_config(None, settings).config) if guarded else nullcontext()
            with found:
                models = job()
                results.append(bits(models))
                if guarded:
                    now = [(type(unwrap(g.model)).__name__, g.watch.ranks.size) for g in found.entered]
                    alone = any(wrapped_later(g.model) for g in found.entered)
        dist.barrier()
        row = {
            "job": name,
            "same": results[0] == results[1],
            "guarded": now,
            "expected": [(type(unwrap(model)).__name__, 2) for model in models],
            "alone": alone,
            "folders": sorted(p.name for p in folder.iterdir()) if folder.exists() else [],
        }
        dist.barrier()
        print(json.dumps(row), flush=True)
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
