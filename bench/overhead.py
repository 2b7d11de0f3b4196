"""What the guard costs: interleaved A/B in one process, process-CPU time a step, one thread.

Each variant has a model and an optimizer of its own and its guard is switched on for its own steps only. Two are unguarded:
where their tensors lie makes a percent, too, and what the second takes of the first tells how exact the rest is. A round runs
one step of every variant in random order; the figure is the median over rounds of variant / mean of both in the same round
(these machines are shared, and a neighbour may spoil single steps), with a 95 % interval from its order statistics (no
distribution is assumed). ``default`` is put together, round by round, from the light and the deep
step (one of them in `DEEP_EVERY`); the calibration replays, two in a thousand steps, are not in it.

    python bench/overhead.py --tokens 512 4096 --dtype float32 bfloat16 --rounds 20
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT

from bitwitness import Guard

CONTEXT = 128


class Variant:
    """One way to train: unguarded, or under a guard with its settings."""

    def __init__(self, name: str, dtype: torch.dtype, settings: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.name = name
        self.dtype = dtype
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.seconds: list[float] = []
        self.own: list[float] = []
        self.guard = None
        if settings is not None:
            self.guard = Guard(self.model, self.optimizer, **settings)
            self.guard.__enter__()
            self.guard.pause()

    def step(self, tokens: torch.Tensor, *, count: bool) -> None:
        """Train one step and note its process-CPU seconds, and the guard's own share of them."""
        if self.guard is not None:
            self.guard.resume()
        own = 0.0 if self.guard is None else self.guard.own_seconds
        started = time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        spent = time.process_time() - started
        if self.guard is not None:
            self.guard.pause()
        if count:
            self.seconds.append(spent)
            self.own.append(0.0 if self.guard is None else self.guard.own_seconds - own)

    def close(self) -> None:
        """Leave the guard."""
        if self.guard is not None:
            self.guard.resume()
            self.guard.close()


SETTINGS: dict[str, dict[str, Any] | None] = {
    "unguarded": None,
    "unguarded again": None,
    "light steps only": {"deep_every": 0, "replay": {"calibrate": False}},
    "every step deep": {"deep_every": 1, "replay": {"calibrate": False}},
}
DEEP_EVERY = 50


def ratio(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Return the median ratio of paired times and the ends of its 95 % interval (all ratios, where they are too few)."""
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    count = len(ratios)
    tail = 0.0
    lower = 0
    for k in range(count // 2):
        tail += math.comb(count, k) / 2**count
        if tail > 0.025:
            break
        lower = k
    return statistics.median(ratios), ratios[lower], ratios[count - 1 - lower]


def measure(tokens: int, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Measure every variant at one batch size and precision."""
    variants = [Variant(name, dtype, settings) for name, settings in SETTINGS.items()]
    generator = torch.Generator().manual_seed(1)
    shuffle = random.Random(2)
    for number in range(rounds + 2):
        batch = torch.randint(0, 4096, (tokens // CONTEXT, CONTEXT + 1), generator=generator)
        for variant in shuffle.sample(variants, len(variants)):
            variant.step(batch, count=number >= 2)
    for variant in variants:
        variant.close()
    first, again, light, deep = variants
    plain = [(a + b) / 2 for a, b in zip(first.seconds, again.seconds, strict=True)]
    rows = [row(variant, first.seconds, tokens) for variant in (first, again)]
    rows += [row(variant, plain, tokens) for variant in (light, deep)]
    share = 1 / DEEP_EVERY
    mixed = [(1 - share) * a + share * b for a, b in zip(light.seconds, deep.seconds, strict=True)]
    middle, low, high = ratio(mixed, plain)
    own = (1 - share) * statistics.fmean(light.own) + share * statistics.fmean(deep.own)
    default = {
        "variant": f"default (1 of {DEEP_EVERY} steps deep)",
        "ms": 1e3 * statistics.median(mixed),
        "ratio": middle,
    }
    rows.insert(3, {**rows[0], **default, "low": low, "high": high, "own_ms": 1e3 * own})
    return rows


def row(variant: Variant, plain: list[float], tokens: int) -> dict[str, Any]:
    """Return one line of the table."""
    middle, low, high = ratio(variant.seconds, plain)
    return {
        "tokens": tokens,
        "dtype": "fp32" if variant.dtype is torch.float32 else "bf16 autocast",
        "variant": variant.name,
        "ms": 1e3 * statistics.median(variant.seconds),
        "ratio": middle,
        "low": low,
        "high": high,
        "own_ms": 1e3 * statistics.median(variant.own),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| tokens | precision | variant | CPU ms/step | ratio | 95 % interval | guard's own ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['tokens']} | {r['dtype']} | {r['variant']} | {r['ms']:.1f} | {r['ratio']:.4f} | "
        f"{r['low']:.4f} – {r['high']:.4f} | {r['own_ms']:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write ``bench/results/overhead.md`` and ``.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        for dtype in args.dtype:
            rows += measure(tokens, getattr(torch, dtype), args.rounds)
            print(table(rows[-5:]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    setting = f"torch {torch.__version__}, {platform.machine()}, one thread, {args.rounds} rounds"
    about = f"{setting}, 11.2 M-parameter GPT, AdamW (for-loop)"
    (args.out / "overhead.md").write_text(f"# What the guard costs\n\n{about}\n\n{table(rows)}\n")
    (args.out / "overhead.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
