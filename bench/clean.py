"""Long runs without faults: how often the guard suspects, and that it never convicts.

    python bench/clean.py --steps 1000

Six settings of a small GPT or convnet at the guard's default settings; spikes, bad batches, a data shift and learning-rate
jumps among them. Prints a table and writes it to ``bench/results/clean.md``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bitwitness.demo.model import ByteGPT, batch, standard_library
from bitwitness.guard import Guard

CONTEXT = 32
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Setting:
    """One way to train. ``spiky``: every so often random labels, constant bytes, a 30-fold learning rate."""

    name: str
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    spiky: bool = False
    autocast: torch.dtype | None = None
    scaler: bool = False
    convnet: bool = False
    shift: bool = False


SETTINGS = (
    Setting("AdamW, warm-up, clipping, fp32", lambda p: torch.optim.AdamW(p, lr=1e-3)),
    Setting("AdamW, spikes and bad batches, bf16", lambda p: torch.optim.AdamW(p, lr=1e-3), True, torch.bfloat16),
    Setting("SGD momentum, spikes and bad batches", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), True),
    Setting("Adam, GradScaler, fp16", lambda p: torch.optim.Adam(p, lr=1e-3), False, torch.float16, True),
    Setting("AdamW, data shift in the middle", lambda p: torch.optim.AdamW(p, lr=1e-3), shift=True),
    Setting("convnet with BatchNorm, SGD, bad batches", lambda p: torch.optim.SGD(p, lr=0.05), True, convnet=True),
)


class ConvNet(nn.Module):
    """A small image classifier that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        )
        self.head = nn.Linear(64, 256)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Read bytes as an image; predict the last of those that follow."""
        image = text.float().view(len(text), 1, 4, -1) / 64 - 2
        return F.cross_entropy(self.head(self.body(image)), following[:, -1])


def data(setting: Setting, step: int, steps: int, text: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    """Draw a batch; in spiky settings a bad one now and then."""
    inputs, targets = batch(text, generator, 4, CONTEXT)
    if setting.shift and step > steps // 2:
        inputs, targets = 255 - inputs, 255 - targets
    if setting.spiky and step % 97 == 50:
        targets = torch.randint(0, 256, targets.shape, generator=generator)
    if setting.spiky and step % 211 == 100:
        inputs, targets = torch.zeros_like(inputs), torch.full_like(targets, 7)
    return [inputs, targets]


def run(setting: Setting, steps: int) -> dict[str, object]:
    """Train one setting under guard; return its counts."""
    torch.manual_seed(0)
    model = ConvNet() if setting.convnet else ByteGPT(width=48, layers=2, heads=2, context=CONTEXT)
    optimizer = setting.optimizer(model.parameters())
    base = optimizer.param_groups[0]["lr"]
    scaler = torch.amp.GradScaler("cpu", enabled=setting.scaler)
    generator = torch.Generator().manual_seed(1)
    text = standard_library(1 << 20)
    with Guard(model, optimizer) as guard:
        for step in range(steps):
            spike = 30.0 if setting.spiky and step % 301 == 200 else 1.0
            for group in optimizer.param_groups:
                group["lr"] = base * min(1.0, (step + 1) / 50) * spike
            dtype = setting.autocast or torch.bfloat16
            with torch.autocast("cpu", dtype=dtype, enabled=setting.autocast is not None):
                loss = model(*data(setting, step, steps, text, generator))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    table = guard.coverage()
    return {
        "setting": setting.name,
        "steps": table["steps"]["held"],
        "suspicions": table["suspicions"],
        "dismissed": table["dismissed"],
        "verdicts": len(table["verdicts"]),
        "failures": len(table["failures"]),
    }


def table(rows: list[dict[str, object]]) -> str:
    """Return the rows as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows])


def main() -> None:
    """Run every setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [run(setting, args.steps) for setting in SETTINGS]
    print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "clean.md").write_text(
        f"# Clean runs\n\n`python bench/clean.py --steps {args.steps}`\n\n{table(rows)}\n"
    )


if __name__ == "__main__":
    main()
