"""The demo's training, as any user would write it: DistributedDataParallel, and checkpoints that are sealed.

Started by ``torchrun --nproc-per-node 4 -m bitwitness.demo.train --steps 45 --out FOLDER``, or by ``bitwitness launch``.
"""

from __future__ import annotations

import argparse
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import bitwitness as bw
from bitwitness.demo.model import ByteGPT, batch, standard_library

CONTEXT = 64  # bytes; it and BATCH are small, since every rank has one core at most
BATCH = 2  # sequences a rank
EVERY = 10  # steps from checkpoint to checkpoint


def main() -> None:
    """Train from the newest checkpoint on; rank 0 writes each step's loss and weights (bit hash) to ``weights.jsonl``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteGPT(width=128, layers=3, context=CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    done, text = resume(model.module, optimizer, args.out / "checkpoints"), standard_library()
    warm_up(model, text)
    for step in range(done, args.steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        inputs, targets = batch(text, generator, BATCH, CONTEXT)
        loss = model(inputs, targets)  # in float32: bfloat16 products take sixty times as long on a CPU without AVX-512
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            tell(step, loss, model, args.out / "weights.jsonl")
        if (step + 1) % EVERY == 0:
            bw.checkpoint.save(state_of(model.module, optimizer), args.out / "checkpoints", step + 1)
    dist.destroy_process_group()


def warm_up(model: nn.Module, text: torch.Tensor) -> None:
    """Run a backward that nobody uses: by the first DistributedDataParallel orders its buckets, and so its sums."""
    model(*batch(text, torch.Generator().manual_seed(0), BATCH, CONTEXT)).backward()
    model.zero_grad()


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Load the newest checkpoint that is sealed and intact, if there is one; return how many steps it has behind it."""
    if bw.checkpoint.latest(folder) is None:
        return 0
    state = state_of(model, optimizer)
    done = bw.checkpoint.load(state, folder) or 0
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return done


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of both; an optimizer has one before its first step, too, into which a checkpoint can be loaded."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def tell(step: int, loss: torch.Tensor, model: nn.Module, path: Path) -> None:
    """Write a line on a step."""
    # Bytes, not torch's operators: on an emulated device each of these would be looked at.
    weights = sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
    line = {"step": step, "loss": float(loss.detach()), "weights": weights}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    if step % EVERY == 0:
        print(f"step {step:3d}  loss {line['loss']:.4f}  weights {weights}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
