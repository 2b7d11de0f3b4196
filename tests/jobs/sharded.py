"""Trainings whose parameters are spread over the ranks: the same bits, and faults; a JSON line each."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from scenarios import fingerprint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bitwitness import Guard, TrainingStopped
from bitwitness.testing import EVERY_STEP, FaultyDevice, contained, from_mapping

STEPS = int(sys.argv[1])
ALWAYS = {**EVERY_STEP, "self_test": True}


class Block(nn.Module):
    """A small residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Some blocks and a scale of one element, whose shards are empty on most ranks; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.drop = nn.Dropout(0.1)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return (self.drop(x) * self.scale - y).square().mean()


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    size = dist.get_world_size()
    if kind == "tensor parallel":
        mesh = init_device_mesh("cpu", (size,))
        for block in net.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return net
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")) if kind == "hybrid" else None
    settings = {"mesh": mesh} if mesh is not None else {}
    if kind == "mixed precision":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "kept":
        settings["reshard_after_forward"] = False
    for block in net.blocks:
        fully_shard(block, **settings)
    return fully_shard(net, **settings)


def train(kind: str, guarded=None) -> tuple[list, Guard | None, int | None]:
    net = build(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=kind != "tensor parallel")
    rank = 0 if kind == "tensor parallel" else dist.get_rank()
    generator = torch.Generator().manual_seed(10 + rank)
    torch.manual_seed(rank)
    guard = None if guarded is None else guarded(net, optimizer)
    lines, stopped = [], None
    accumulate = 2 if kind == "accumulated" else 1
    with guard or nullcontext():
        try:
            for _ in range(STEPS):
                for micro in range(accumulate):
                    if accumulate > 1:
                        net.set_requires_gradient_sync(micro == accumulate - 1)
                    loss = net(torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator))
                    loss.backward()
                if kind != "tensor parallel":  # torch does not clip plain and distributed gradients together
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                state = [*net.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
                local = [v.to_local() if hasattr(v, "to_local") else v for v in state]
                lines.append(
                    [
                        float(loss.detach()),
                        fingerprint(local),
                        int(torch.get_rng_state().sum()),
                    ]
                )
        except TrainingStopped as stop:
            stopped = stop.code
    return lines, guard, stopped


def told(case: str, **mine) -> None:
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        print(json.dumps({"case": case, "ranks": everyone}), flush=True)


def identity(kind: str) -> list:
    """Return the lines of the plain training."""
    plain, *_ = train(kind)
    watched, guard, _ = train(kind, lambda m, o: Guard(m, o, deep_every=2, **ALWAYS))
    table = guard.coverage()
    kept = ("suspicions", "dismissed", "verdicts", "failures", "not_covered", "local_gradients", "replay")
    table = {name: table[name] for name in kept} | {"checked": table["operators"]["share_checked"]}
    told(f"identity {kind}", same=plain == watched, table=table)
    return plain


def fault(kind: str, clean: list, name: str, **how) -> None:
    what = {"site": "*down/mm:backward", "rank": 1, "kind": "multiply", "factor": 1e4, "pattern": "all", **how}
    with FaultyDevice(from_mapping({"fault": [what]}), rank=dist.get_rank()) as device:
        lines, guard, stopped = train(
            kind, lambda m, o: Guard(m, o, act="protect", deep_every=0, trend={"warmup": 3}, ranks={"deadline_s": 20.0})
        )
    verdicts = [[v.step, str(v.cause), list(v.ranks), str(v.action), str(v.site)] for v in guard.verdicts]
    told(f"{name} {kind}", verdicts=verdicts, stopped=stopped, struck=len(device.fired), healed=bool(lines) and
         [x[1:] for x in lines] == [x[1:] for x in clean], failures=guard.reporter.failures)  # fmt: skip


@contained()
def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    kinds = (
        ["plain", "kept", "accumulated", "mixed precision"] + (["hybrid"] if size == 4 else []) + ["tensor parallel"]
    )
    only = sys.argv[2:]
    for kind in kinds:
        if only and kind not in only:
            continue
        clean = identity(kind)
        fault(kind, clean, "transient", steps=[3], times=1)
        if kind in ("plain", "hybrid"):
            fault(kind, clean, "persistent", from_step=3)
    time.sleep(0.2)  # gloo's threads let go of the last exchange before the interpreter ends
    dist.destroy_process_group()


main()
