"""What a monitor costs: interleaved A/B in one process, process-CPU time a step, one thread.

    python bench/monitor.py [--rounds 20] [--only NAME …]

Each way to monitor has a model of its own, watched for its own steps only. A round runs four steps of each in random order,
and of an unmonitored one; the figure is the median over rounds of monitored over unmonitored in the same round, with a 95 %
interval from the order statistics. What the monitor's thread spends (tables, rules, the disk) is in it: it is waited for,
and written to the disk, at the end of the four. GPT of 11.2 million parameters, 4 x 128 tokens, float32, AdamW as a for-
loop, as on the reference's page.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from overhead import ratio

import bitwitness as bw

GRADIENTS = ("training", "grad", "grad_reduced")
CASES: dict[str, tuple[dict[str, Any], float | None]] = {
    "gradients": ({"kinds": GRADIENTS}, 1.03),
    "gradients, no rules": ({"kinds": GRADIENTS, "watch": False}, None),
    "activations": ({"kinds": ("training", "activation", "activation_grad")}, None),
    "weights and optimizer": ({"kinds": ("training", "param", "moment1", "moment2", "update")}, None),
    "everything": ({}, 1.3),
    "everything, zeros": ({"zeros": True}, None),
}
VOCABULARY, SHAPE, STEPS = 4096, (4, 129), 4


class Variant:
    """One way to train: plain, or monitored."""

    def __init__(self, name: str, settings: dict[str, Any] | None, folder: Path) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.seconds: list[float] = []
        self.monitor = None
        if settings is not None:
            self.monitor = bw.Monitor(self.model, out=folder / name.replace(" ", "_"), **settings).start()
            self.monitor.pause()

    def steps(self, batches: list[torch.Tensor], *, count: bool) -> None:
        """Train some steps and note the process-CPU seconds of one."""
        if self.monitor is not None:
            self.monitor.resume()
        started = time.process_time()
        for tokens in batches:
            self.model(tokens[:, :-1], tokens[:, 1:]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.pause()  # closes the last step, and waits for what its thread makes of them
        if count:
            self.seconds.append((time.process_time() - started) / len(batches))


def main() -> None:
    """Measure, print, and write ``bench/results/monitor.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="these alone; nothing is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shuffle, generator = random.Random(2), torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory(prefix="bench-monitor-") as scratch:
        variants = [Variant("plain", None, Path(scratch))]
        variants += [Variant(name, CASES[name][0], Path(scratch)) for name in args.only or CASES]
        for number in range(args.rounds + 2):
            batches = [torch.randint(0, VOCABULARY, SHAPE, generator=generator) for _ in range(STEPS)]
            for variant in shuffle.sample(variants, len(variants)):
                variant.steps(batches, count=number >= 2)
        for variant in variants:
            if variant.monitor is not None:
                variant.monitor.close()
    lines = ["| monitored | CPU ms/step | ratio | 95 % interval | target |", "|---|---|---|---|---|"]
    plain = variants[0].seconds
    lines += [f"| nothing | {1e3 * statistics.median(plain):.0f} | 1 | | |"]
    for variant in variants[1:]:
        middle, low, high = ratio(variant.seconds, plain)
        target = CASES[variant.name][1]
        told = "" if target is None else f"≤ {target:g}: {'kept' if middle <= target else 'missed'}"
        spent = f"{1e3 * statistics.median(variant.seconds):.0f}"
        lines.append(f"| {variant.name} | {spent} | {middle:.3f} | {low:.3f} – {high:.3f} | {told} |")
    command = " ".join(["python bench/monitor.py", f"--rounds {args.rounds}"])
    text = f"`{command}`: torch {torch.__version__}, {platform.machine()}, Python {sys.version.split()[0]}, one thread."
    print(text, *lines, sep="\n")
    if not args.only:
        (Path(__file__).parent / "results" / "monitor.md").write_text(
            f"# What a monitor costs\n\n{text}\n\n" + "\n".join(lines) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
