"""Two ranks save a sharded model (FSDP2). Arguments: the folder, the file where they meet. They share one import of torch."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def numbers() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3), nn.LayerNorm(3))  # odd sizes: shards are uneven


def save(rank: int, folder: str, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = numbers()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    dcp.save({"model": model.state_dict(), "same": torch.arange(4.0), "step": 3}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch._dynamo  # fully_shard would, in each process

    torch.set_num_threads(1)
    child = os.fork()  # no thread runs yet
    save(1 if child == 0 else 0, *sys.argv[1:])
    failed = child != 0 and os.waitpid(child, 0)[1] != 0
    os._exit(int(failed))  # torch takes a second to be torn down
