"""What seals of checkpoints cost, against the write itself: ``python bench/sealing.py [--mib 256] [--repeat 5]``.

Prints the median seconds of `torch.save` without a guard and with one (what the training waits for), of sealing in the
background, of reading with and without verifying, and of `bw.checkpoint.save` against ``dcp.save`` of the same state.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import bitwitness as bw
from bitwitness.checkpoint.inmemory import hashes_of_state
from bitwitness.checkpoint.watched import WatchedCheckpoints


def seconds(action: Callable[[int], object], repeat: int) -> float:
    """Return the median time of so many calls, each given its number; what is written reaches the disk between them."""
    times = []
    for number in range(repeat):
        os.sync()
        begin = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def cpu(action: Callable[[], object]) -> float:
    """Return the least processor seconds of three calls: what others do on the machine counts for nothing."""
    times = []
    for _ in range(3):
        begin = time.thread_time()
        action()
        times.append(time.thread_time() - begin)
    return min(times)


def under_guard(state: dict[str, torch.Tensor], folder: Path, repeat: int) -> tuple[float, float]:
    """Return the median seconds that a save takes while its checkpoints are watched, and until it is sealed after that."""
    saving, sealing = [], []
    for number in range(repeat):
        os.sync()
        with WatchedCheckpoints(print):
            begin = time.perf_counter()
            torch.save(state, folder / f"{number}.pt")
            saving.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        sealing.append(time.perf_counter() - begin)
    return statistics.median(saving), statistics.median(sealing)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled|Detected an existing")
    state = {f"layer.{i}.weight": torch.randn(1 << 20) for i in range(args.mib // 4)}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        folder = Path(scratch)
        plain = seconds(lambda _: torch.save(state, folder / "plain.pt"), args.repeat)
        guarded, sealing = under_guard(state, folder, args.repeat)
        read = seconds(lambda _: torch.load(folder / "plain.pt"), args.repeat)
        verify = seconds(lambda n: bw.checkpoint.verify(folder / f"{n}.pt"), args.repeat)
        print(f"{args.mib} MiB in {len(state)} tensors, torch {torch.__version__}, {torch.get_num_threads()} threads")
        print(
            f"of the processor alone: the write {cpu(lambda: torch.save(state, folder / 'plain.pt')):.3f} s, ", end=""
        )
        print(f"hashing the tensors before it {cpu(lambda: hashes_of_state(state)):.3f} s")
        print(f"torch.save {plain:.3f} s, under guard {guarded:.3f} s (+{guarded / plain - 1:.0%})")
        print(f"sealing in the background {sealing:.3f} s; torch.load {read:.3f} s, verifying {verify:.3f} s")
        theirs = seconds(lambda n: dcp.save(state, checkpoint_id=folder / f"d{n}", no_dist=True), args.repeat)
        ours = seconds(lambda n: bw.checkpoint.save(state, folder / "ours", n, keep=2).result(), args.repeat)
        later = []
        for number in range(args.repeat):
            begin = time.perf_counter()
            saving = bw.checkpoint.save(state, folder / "later", number, asynchronous=True, keep=2)
            later.append(time.perf_counter() - begin)
            saving.result()
        print(f"dcp.save {theirs:.3f} s, bw.checkpoint.save {ours:.3f} s")
        print(f"asynchronous, until it returns: {statistics.median(later):.3f} s")


if __name__ == "__main__":
    main()
