"""A training that resumes from sealed checkpoints; see ``recovery_kills.py``.

bitwitness launch --nproc-per-node 8 … bench/recovery_job.py FOLDER STEPS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import bitwitness as bw
from bitwitness.demo.model import ByteGPT

_EVERY = 3  # steps from checkpoint to checkpoint


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of both, the optimizer's by its parameters' names, before its first step, too."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Load the newest checkpoint that is sealed and intact; return how many steps it has behind it."""
    state = state_of(model, optimizer)
    done = bw.checkpoint.load(state, folder)
    if done is None:
        return 0
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return done


def main(folder: Path, steps: int) -> None:
    """Train to the end, from the newest checkpoint; rank 0 writes the final loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(ByteGPT(width=32, layers=2, heads=2, context=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = resume(model.module, optimizer, folder)
    loss = torch.zeros(())
    for step in range(done, steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        text = torch.randint(0, 64, (2, 17), generator=generator)
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % _EVERY == 0:
            bw.checkpoint.save(state_of(model.module, optimizer), folder, step + 1)
    if dist.get_rank() == 0:
        done_at = {"steps": steps, "ranks": dist.get_world_size(), "loss": float(loss.detach())}
        folder.with_name("final.json").write_text(json.dumps(done_at))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
