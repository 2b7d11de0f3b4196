"""Two ranks save a sharded model (FSDP2) and its optimizer; arguments: the folder. Every rank fills in the same numbers."""

from __future__ import annotations

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


def main() -> None:
    dist.init_process_group("gloo")
    model = numbers()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    dcp.save({"model": model.state_dict(), "same": torch.arange(4.0), "step": 3}, checkpoint_id=sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
