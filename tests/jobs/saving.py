"""Saves checkpoints: ``saving.py loop FOLDER`` until it is killed; ``saving.py ranks FOLDER`` a sharded tensor, too."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import bitwitness as bw


def loop(folder: str) -> None:
    """Save again and again, every other one in the background, the newest three kept, and some of them once more."""
    state = {
        "weights": torch.arange(200_000.0),
        "more": {str(i): torch.full((1000,), float(i)) for i in range(8)},
        "n": 0,
    }
    begin = bw.checkpoint.load(state, folder) or 0
    for step in range(begin, begin + 1000):
        state["weights"].fill_(step)
        state["n"] = step
        bw.checkpoint.save(state, folder, step, asynchronous=step % 2 == 0, keep=3)
        print(step, flush=True)


def ranks(folder: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.arange(100.0).view(20, 5), mesh, [Shard(0)])
    state = {"net": net.state_dict(), "sharded": sharded, "n": 3, "name": "x", "pair": (1, 2.5)}
    bw.checkpoint.save(state, folder, 10)
    later = bw.checkpoint.save(state, folder, 20, asynchronous=True)
    with torch.no_grad():
        net.weight.zero_()
        sharded.zero_()
    assert later.result(60).name == "step-00000020"
    dist.barrier()
    if dist.get_rank() == 1:
        damage(f"{folder}/step-00000020/__1_0.distcp")
    dist.barrier()
    assert bw.checkpoint.load(state, folder) == 10
    assert net.weight.abs().sum() > 0, "what was loaded is in place"
    assert torch.equal(sharded.full_tensor(), torch.arange(100.0).view(20, 5))
    assert (state["n"], state["name"], state["pair"]) == (3, "x", (1, 2.5))
    dist.destroy_process_group()


def damage(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    data[data.index(torch.arange(50.0, 100.0).numpy().tobytes()) + 5] ^= 4
    Path(path).write_bytes(data)


if __name__ == "__main__":
    {"loop": loop, "ranks": ranks}[sys.argv[1]](sys.argv[2])
