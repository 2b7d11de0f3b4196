"""The pace at which replicated state is hashed, against that at which memory can be read.

    python bench/replicas.py --gigabytes 1

One thread, a model's worth of tensors, process-CPU time, the best of several turns, each turn all ways one after another.
Reading is the fastest of torch's own one-pass reductions over the same memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bitwitness.stats import HashBatch
from bitwitness.stats import reader as compiled

GOAL = 0.6
_TENSOR = 4 << 20  # elements: 16 MiB of float32, a 2048 x 2048 matrix


def tensors_of(gigabytes: float) -> list[torch.Tensor]:
    """Return float32 matrices, each with a bias vector."""
    count = max(1, round(gigabytes * 1e9 / 4 / _TENSOR))
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(_TENSOR, generator=generator) for _ in range(count)]
    return [tensor for one in made for tensor in (one, one[:2048].clone())]


def hash_all(tensors: list[torch.Tensor]) -> None:
    """Hash as the guard does."""
    batch = HashBatch()
    for tensor in tensors:
        batch.add(tensor)
    torch.stack(batch.finish())


def read_sum(tensors: list[torch.Tensor]) -> None:
    """Sum the values."""
    for tensor in tensors:
        tensor.sum()


def read_words(tensors: list[torch.Tensor]) -> None:
    """Sum words of 64 bits."""
    for tensor in tensors:
        tensor.view(torch.int64).sum()


def seconds(action: Callable[[list[torch.Tensor]], None], tensors: list[torch.Tensor]) -> float:
    """Return the process-CPU seconds of one turn."""
    begun = time.process_time()
    action(tensors)
    return time.process_time() - begun


def main() -> int:
    """Measure, and write the table; 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tensors = tensors_of(asked.gigabytes)
    size = sum(tensor.nbytes for tensor in tensors) / 1e9
    ways = {"sum of values": read_sum, "sum of words": read_words, "hash": hash_all}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(asked.turns):
        for name, way in ways.items():
            best[name] = min(best[name], seconds(way, tensors))
    reading = min(best["sum of values"], best["sum of words"])
    share = reading / best["hash"]
    how = "compiled" if compiled.built() is not None else "torch's operators"
    lines = [
        f"# {size:.2f} GB of parameters hashed, one thread",
        "",
        f"`python bench/replicas.py --gigabytes {asked.gigabytes:g} --turns {asked.turns}`, torch {torch.__version__}, {how}",
        "",
        "| way | seconds | GB/s |",
        "|---|---|---|",
        *(f"| {name} | {taken:.4f} | {size / taken:.1f} |" for name, taken in best.items()),
        "",
        f"The hash runs at {share:.0%} of the pace at which this machine reads memory (goal: {GOAL:.0%}).",
    ]
    print("\n".join(lines))
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n")
    return 0 if share >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
