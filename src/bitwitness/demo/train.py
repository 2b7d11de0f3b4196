"""One rank of the demo's two trainings, without faults and with them.

Started by ``torchrun --nproc-per-node 4 -m bitwitness.demo.train --steps 45 --clean CLEAN --out GUARDED --faults FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bitwitness.demo.model import ByteGPT, batch, standard_library
from bitwitness.guard import Guard
from bitwitness.inject.device import FaultyDevice
from bitwitness.inject.faults import load_faults

CONTEXT = 64  # bytes; it and BATCH are small, since every rank has one core at most
BATCH = 2  # sequences a rank


def main() -> None:
    """Train plain, then under guard; write each one's weights (bit hash) and losses to ``weights.jsonl`` (rank 0)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--clean", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--faults", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = build()
    train(model, optimizer, args.steps, args.clean)
    model, optimizer = build()
    device = FaultyDevice(load_faults(args.faults), rank=dist.get_rank())
    with device, Guard(model, optimizer, out=args.out / "run", act="protect", deep_every=10):
        train(model, optimizer, args.steps, args.out)
    dist.destroy_process_group()


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Return the model, the same each time, and its optimizer."""
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteGPT(width=128, layers=3, context=CONTEXT))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, out: Path) -> None:
    """Run the loop that any user would write."""
    text = standard_library()
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    for step in range(steps):
        inputs, targets = batch(text, generator, BATCH, CONTEXT)
        loss = model(inputs, targets)  # in float32: bfloat16 products take sixty times as long on a CPU without AVX-512
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            # Bytes, not torch's operators: on an emulated device each of these would be looked at.
            weights = sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
            line = {
                "step": step,
                "loss": float(loss.detach()),
                "weights": weights.hexdigest()[:16],
            }
            with (out / "weights.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            if step % 10 == 0:
                print(f"step {step:3d}  loss {line['loss']:.4f}  weights {line['weights']}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
