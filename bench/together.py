"""What a guard, a tracer and a recorder cost on one model at once, against the sum of what each costs alone.

    python bench/together.py [--rounds 20] [--level modules]

Trainings of equal models take turns, step by step and in random order, in one process; the figure is the median over rounds of
process-CPU time over the plain training's, with a 95 % interval from the order statistics. At the end all weights are compared,
bit by bit, and the numbers that each instrument gives the last step.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from overhead import ratio

import bitwitness as bw

BATCH, CONTEXT, VOCABULARY = 4, 128, 4096
WARM_UP = 3
APART = ("guard", "tracer", "recorder")


class Training:
    """One of the trainings, and what watches it."""

    def __init__(self, name: str, level: str, folder: Path) -> None:
        self.name = name
        torch.manual_seed(0)
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.seconds: list[float] = []
        self.stack = ExitStack()
        make: dict[str, Any] = {
            "guard": lambda: bw.Guard(self.model, self.optimizer, self_test=False),
            "tracer": lambda: bw.NonfiniteTracer(self.model, self.optimizer),
            "recorder": lambda: bw.Recorder(self.model, out=folder / name, level=level),
        }
        wanted = APART if name == "all" else () if name == "plain" else (name,)
        self.watching = [self.stack.enter_context(make[one]()) for one in wanted]

    def step(self, batch: torch.Tensor, *, count: bool) -> None:
        """Train one step."""
        started = time.process_time()
        self.optimizer.zero_grad()
        self.model(batch[:, :-1], batch[:, 1:]).backward()
        self.optimizer.step()
        if count:
            self.seconds.append(time.process_time() - started)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--level", default="modules")
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator, shuffle = torch.Generator().manual_seed(1), random.Random(2)
    with tempfile.TemporaryDirectory() as folder:
        trainings = [Training(name, args.level, Path(folder)) for name in ("plain", *APART, "all")]
        for number in range(args.rounds + WARM_UP):
            batch = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
            for training in shuffle.sample(trainings, len(trainings)):
                training.step(batch, count=number >= WARM_UP)
        numbers = {one.session.step for training in trainings for one in training.watching}
        for training in trainings:
            training.stack.close()
    plain, *_, together = trainings
    added = {}
    for training in trainings[1:]:
        middle, low, high = ratio(training.seconds, plain.seconds)
        added[training.name] = middle - 1
        print(f"{training.name:9s} {middle:.3f} of a plain step ({low:.3f} to {high:.3f})")
    total = sum(added[name] for name in APART)
    # Round by round, so that what slows a round down slows both sides: (all + plain + plain) over (guard + tracer + recorder).
    extra = [together.seconds[i] + 2 * plain.seconds[i] for i in range(args.rounds)]
    apart = [sum(training.seconds[i] for training in trainings[1:-1]) for i in range(args.rounds)]
    middle, low, high = (3 * (figure - 1) for figure in ratio(extra, apart))  # three trainings on either side
    print(f"all at once add {added['all']:.1%}; the sum of what each adds alone is {total:.1%}")
    print(f"more than the sum, round by round: {middle:+.1%} of a step ({low:+.1%} to {high:+.1%})")
    pairs = zip(plain.model.parameters(), together.model.parameters(), strict=True)
    print(f"weights equal, bit by bit: {all(torch.equal(a, b) for a, b in pairs)}; numbers of the last step: {numbers}")


if __name__ == "__main__":
    main()
