"""Is the stated price kept? Four trainings of different size, each with a budget.

    python bench/price.py --budget 0.1 --blocks 16

Phase one trains under ``Guard(budget=…)`` until it has settled how many steps are deep. Phase two measures from outside:
blocks of guarded and of unguarded steps on the same batches by turns, process-CPU time, the median over blocks.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT
from torch import nn

from bitwitness import Guard


class ResidualNet(nn.Module):
    """A convnet with BatchNorm and residual connections for 32 x 32 images; returns the loss."""

    def __init__(self, width: int = 48, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)),
                *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of [batch, 3, 32, 32] images."""
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


@dataclass(frozen=True)
class Training:
    """A model, and how a batch for it is drawn."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]


def _text(
    vocabulary: int, sequences: int, length: int
) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, vocabulary, (sequences, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return draw


def _images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 3, 32, 32, generator=generator), torch.randint(0, 10, (32,), generator=generator)


TRAININGS = (
    Training("GPT, 0.9 M parameters, 2,048 tokens", lambda: GPT(512, 128, 4, 4), _text(512, 16, 128)),
    Training("residual convnet, 0.2 M, 32 images", ResidualNet, _images),
    Training("GPT, 4.2 M, 2,048 tokens", lambda: GPT(2048, 256, 4, 4), _text(2048, 16, 128)),
    Training("GPT, 11.2 M, 1,024 tokens", GPT, _text(4096, 8, 128)),
)


class Loop:
    """One training, guarded as asked or not."""

    def __init__(self, training: Training, settings: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model = training.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.guard = None if settings is None else Guard(self.model, self.optimizer, **settings)
        if self.guard is not None:
            self.guard.__enter__()

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Train one step; return its process-CPU seconds."""
        started = time.process_time()
        self.model(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - started


def settle(loop: Loop, training: Training, steps: int, generator: torch.Generator) -> dict[str, Any]:
    """Train until the guard has settled its plan; return what it says of its price."""
    assert loop.guard is not None
    for _ in range(steps):
        loop.step(training.batch(generator))
    report: dict[str, Any] = loop.guard.coverage()["price"]
    return report


def measure(
    guarded: Loop, training: Training, *, block: int, blocks: int, generator: torch.Generator
) -> tuple[float, float, float]:
    """Return what the guard adds to a block of steps, as a share of an unguarded one: median and quartiles.

    A block holds a deep step or so, as rare, and as cold, as it is in the training.
    """
    assert guarded.guard is not None
    guarded.guard.pause()
    plain = Loop(training, None)
    plain.step(training.batch(generator))
    shuffle = random.Random(1)
    added = []
    for _ in range(blocks):
        batches = [training.batch(generator) for _ in range(block)]
        spent = {}
        for loop in shuffle.sample([plain, guarded], 2):
            if loop.guard is not None:
                loop.guard.resume()
            spent[loop is guarded] = sum(loop.step(batch) for batch in batches)
            if loop.guard is not None:
                loop.guard.pause()
        added.append(spent[True] / spent[False] - 1)
    low, _, high = statistics.quantiles(added, n=4)
    return statistics.median(added), low, high


def main() -> None:
    """Settle, measure, print, write ``bench/results/price.md``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=48, help="steps in which the guard settles")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = "| training | budget | guard says | measured | quartiles | of the budget | light steps | a deep step | one deep in |"
    lines = [head, "|" + "---|" * 9]
    for training in TRAININGS:
        generator = torch.Generator().manual_seed(1)
        loop = Loop(training, {"budget": args.budget, "replay": {"calibrate": False}})
        told = settle(loop, training, args.steps, generator)
        block = max(told["deep_every"], 8)
        price, low, high = measure(loop, training, block=block, blocks=args.blocks, generator=generator)
        assert loop.guard is not None
        told = loop.guard.coverage()["price"]
        loop.guard.close()
        lines.append(
            f"| {training.name} | {args.budget:.1%} | {told['measured']:.2%} | {price:.2%} | {low:.2%} – {high:.2%} | "
            f"{price / args.budget:.2f} | {told['light']:.2%} | {told['deep_step_costs']:.1%} | {told['deep_every']} |"
        )
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "price.md").write_text(
        f"# Is the stated price kept?\n\n`python bench/price.py --budget {args.budget} --blocks {args.blocks}`\n\n{text}\n"
    )


if __name__ == "__main__":
    main()
