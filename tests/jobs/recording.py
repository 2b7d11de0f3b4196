"""Trainings on several ranks, each recorded: ``python recording.py FOLDER CASE …``.

A case is the wrapper (``ddp``, ``fsdp``, ``tp``; ``hand``: the script reduces the gradients), a dash, and what is different:
``none``, ``residual`` (rank 1 leaves one out), ``weight`` (one row of a weight is larger, on the rank that holds it), ``own``
(one gradient is not reduced), ``received`` (rank 1 receives one wrongly), ``late`` (they are clipped), ``early`` (each rank
clips its own before they are reduced).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import bitwitness as bw

CLIPPED = 1e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(16)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.residual = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc2(torch.nn.functional.gelu(self.fc1(self.ln(x))))
        return x + y if self.residual else y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(case: str, rank: int) -> nn.Module:
    wrapper, _, what = case.partition("-")
    torch.manual_seed(0)
    net = Net()
    if what == "residual" and rank == 1:
        net.blocks[1].residual = False
    if what == "weight":
        with torch.no_grad():
            net.blocks[1].fc1.weight[20] *= 1.5
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(wrapper,))
    if wrapper == "fsdp":
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    if wrapper == "tp":
        for block in net.blocks:
            parallelize_module(block, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
        return net
    return net if wrapper == "hand" else DistributedDataParallel(net)


def reduced_by_hand(net: nn.Module, case: str) -> None:
    for name, parameter in net.named_parameters():
        if case != "hand-own" or name != "blocks.1.fc1.weight":
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        if case == "hand-received" and name == "blocks.1.fc1.weight" and dist.get_rank() == 1:
            parameter.grad[3] *= 4


def train(case: str, out: Path, rank: int) -> None:
    model = build(case, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    alike = case.startswith("tp")
    generator = torch.Generator().manual_seed(7 if alike else 7 + rank)
    with bw.Recorder(model, out=out, content="stats"):
        for _ in range(2):
            loss = model(torch.randn(6, 16, generator=generator)).square().mean()
            loss.backward()
            if case == "hand-early":
                nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
            if case.startswith("hand"):
                reduced_by_hand(model, case)
            if case == "hand-late":
                nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0 or alike:
        print(f"{case} {rank} {float(loss.detach())!r}", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    for case in cases:
        train(case, folder / case, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
