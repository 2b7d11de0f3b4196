"""Long runs without faults: how often the guard suspects, and that it never convicts.

    python bench/clean.py --steps 2000

Fourteen trainings at the guard's default settings, or with every step deep (``--deep-every 1``): several models, optimizers and
learning rates; a data shift, experts without tokens, and in the spiky ones bad batches and jumps of the learning rate. Prints a
table and writes it to ``bench/results/clean.md``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from detection.subjects import ConvNet, Llama, MixtureOfExperts, Recurrent, UNet
from torch import nn

from bitwitness import Guard
from bitwitness.demo.model import ByteGPT, batch, standard_library

CONTEXT = 32
BF16 = torch.bfloat16
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Setting:
    """One way to train. ``spiky``: every so often random labels, constant bytes, a 30-fold learning rate."""

    name: str
    model: Callable[[], nn.Module]
    optimizers: Callable[[Iterable[nn.Parameter]], list[Optimizer]]
    spiky: bool = False
    autocast: torch.dtype | None = None
    scaler: bool = False
    shift: bool = False


def _gpt() -> nn.Module:
    return ByteGPT(width=48, layers=2, heads=2, context=CONTEXT)


def _muon(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Return Muon for the matrices and AdamW for the rest."""
    every = list(parameters)
    matrices = [p for p in every if p.ndim == 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW([p for p in every if p.ndim != 2], lr=1e-3)]


SETTINGS = (
    Setting("GPT, AdamW, warm-up, clipping, fp32", _gpt, lambda p: [torch.optim.AdamW(p, lr=1e-3)]),
    Setting(
        "GPT, AdamW, bf16, 10 times the learning rate", _gpt, lambda p: [torch.optim.AdamW(p, lr=1e-2)], autocast=BF16
    ),
    Setting(
        "GPT, Adam, GradScaler, fp16",
        _gpt,
        lambda p: [torch.optim.Adam(p, lr=1e-3)],
        autocast=torch.float16,
        scaler=True,
    ),
    Setting("GPT, Muon beside AdamW", _gpt, _muon),
    Setting("GPT, data shift in the middle", _gpt, lambda p: [torch.optim.AdamW(p, lr=1e-3)], shift=True),
    Setting("Llama-style, dropout, tied, AdamW", lambda: Llama(48, 2), lambda p: [torch.optim.AdamW(p, lr=1e-3)]),
    Setting("mixture of experts, AdamW", MixtureOfExperts, lambda p: [torch.optim.AdamW(p, lr=1e-3)]),
    Setting("LSTM, RMSprop", Recurrent, lambda p: [torch.optim.RMSprop(p, lr=1e-3)]),
    Setting("GPT, AdamW, bf16", _gpt, lambda p: [torch.optim.AdamW(p, lr=1e-3)], spiky=True, autocast=BF16),
    Setting("GPT, SGD momentum", _gpt, lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9)], spiky=True),
    Setting("convnet with BatchNorm, SGD", ConvNet, lambda p: [torch.optim.SGD(p, lr=0.05)], spiky=True),
    Setting("UNet with GroupNorm, in place, AdamW", UNet, lambda p: [torch.optim.AdamW(p, lr=1e-3)]),
    Setting(
        "UNet with GroupNorm, in place, bf16",
        UNet,
        lambda p: [torch.optim.AdamW(p, lr=3e-3)],
        spiky=True,
        autocast=BF16,
    ),
    Setting("LSTM, Adam", Recurrent, lambda p: [torch.optim.Adam(p, lr=2e-3)], spiky=True),
)


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


def run(setting: Setting, steps: int, deep_every: int | None = None) -> dict[str, object]:
    """Train one setting under guard; return its counts."""
    torch.manual_seed(0)
    model = setting.model()
    optimizers = setting.optimizers(model.parameters())
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    base = [group["lr"] for group in groups]
    scaler = torch.amp.GradScaler("cpu", enabled=setting.scaler)
    generator = torch.Generator().manual_seed(1)
    text = standard_library(1 << 20)
    options = {} if deep_every is None else {"deep_every": deep_every}
    with Guard(model, optimizers, **options) as guard:
        assert guard.reporter is not None
        guard.reporter.say = lambda _text: None  # type: ignore[method-assign]
        for step in range(steps):
            spike = 30.0 if setting.spiky and step % 301 == 200 else 1.0
            for group, rate in zip(groups, base, strict=True):
                group["lr"] = rate * min(1.0, (step + 1) / 50) * spike
            with torch.autocast("cpu", dtype=setting.autocast or BF16, enabled=setting.autocast is not None):
                loss = model(*data(setting, step, steps, text, generator))
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
    table = guard.coverage()
    return {
        "setting": setting.name + (" (spikes and bad batches)" if setting.spiky else ""),
        "steps": table["steps"]["held"],
        "suspicions": table["suspicions"],
        "per 1,000": round(1000 * table["suspicions"] / max(1, table["steps"]["held"]), 2),
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
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--deep-every", type=int, help="one in so many steps deep, whatever it costs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for setting in SETTINGS:
        rows.append(run(setting, args.steps, args.deep_every))
        print(rows[-1], flush=True)
    print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    every = "" if args.deep_every is None else f" --deep-every {args.deep_every}"
    (args.out / "clean.md").write_text(
        f"# Clean runs\n\n`python bench/clean.py --steps {args.steps}{every}`\n\n{table(rows)}\n"
    )


if __name__ == "__main__":
    main()
