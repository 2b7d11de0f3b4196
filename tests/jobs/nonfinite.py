"""Trainings on several ranks whose numbers stop being finite on one of them; prints one JSON line a rank.

``python nonfinite.py CASE …``; a case is the wrapper (``ddp``, ``fsdp``), a dash, and what happens: ``log`` (rank 1's batch
drives a logarithm of zero), ``parameter`` (rank 1's shard or replica), ``reduction`` (every rank's gradient is finite in
float16, the sum is not), ``cast`` (none is, when FSDP2 casts it for the reduction), ``term`` (a term of rank 1's loss that no
replay repeats), ``none``.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import bitwitness as bw

SIZES = {"reduction": 8e4, "cast": 3e5}
"""The struck step's loss is so many times as large: the largest gradient is three quarters of it; float16 ends at 65504."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.fc(x).square() * x.abs().amax())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x)) if bool((x != 0).any()) else self.inner(x)).mean()


def sum_in_half(_state, bucket):
    """Sum in float16 before dividing: two ranks' gradients are finite, their sum is not."""
    whole = bucket.buffer().half()
    dist.all_reduce(whole)
    done = allreduce_hook(None, bucket)
    half = whole.float() / dist.get_world_size()
    return done.then(lambda _: half)


def build(case: str) -> tuple[nn.Module, str]:
    wrapper, _, what = case.partition("-")
    torch.manual_seed(0)
    net = Net()
    if wrapper == "fsdp":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16 if what in SIZES else torch.float32)
        fully_shard(net.inner, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
        if what == "reduction":
            net.inner.set_gradient_divide_factor(1.0)  # else it divides before it sums, and no sum overflows
            net.set_gradient_divide_factor(1.0)
        return net, what
    net = DistributedDataParallel(net)
    if what == "reduction":
        net.register_comm_hook(None, sum_in_half)
    return net, what


def train(case: str) -> list[dict]:
    """Train three steps, the second of which is struck; return this rank's findings."""
    rank = dist.get_rank()
    net, what = build(case)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    torch.manual_seed(0 if what in SIZES else rank)  # equal gradients add up
    with bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(3):
            x = torch.randn(4, 8)
            struck = step == 1 and rank == 1
            if struck and what == "log":
                x.zero_()
            if struck and what == "parameter":
                weight = next(net.parameters())
                with torch.no_grad():
                    (weight.to_local() if hasattr(weight, "to_local") else weight)[0, 0] = float("nan")
            # before the model's forward: no replay goes back through it
            term = sum(p.square().sum() for p in net.parameters()) * 0 if struck and what == "term" else 0
            term = term.sqrt() if struck and what == "term" else 0
            loss = net(x) * (SIZES.get(what, 1.0) if step == 1 else 1.0) + term
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [
        {"step": f.step, "site": f.site.short, "kind": f.evidence["kind"], "message": f.message} for f in trace.findings
    ]


def judged() -> list[str]:
    """Train under the whole guard with a logarithm of zero on rank 1; return the verdicts."""
    torch.manual_seed(0)
    net = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    with bw.Guard(net, optimizer) as guard:
        for step in range(3):
            x = torch.randn(4, 8) * float(step != 1 or dist.get_rank() != 1)
            optimizer.zero_grad()
            net(x).backward()
            optimizer.step()
    return [f"{verdict.cause}: {verdict.message}" for verdict in guard.verdicts]


def main() -> None:
    dist.init_process_group("gloo")
    for case in sys.argv[1:]:
        print(json.dumps({"rank": dist.get_rank(), "case": case, "findings": train(case)}), flush=True)
    print(json.dumps({"rank": dist.get_rank(), "case": "guard", "findings": judged()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
