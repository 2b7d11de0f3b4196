"""Who made the first NaN, on drawn trainings: models, dtypes, checkpointing, loops and faults at random.

    python bench/trace_campaign.py --trials 300

Each trial trains a transformer for four steps; at one of them one of `nonfinite_zoo`'s faults is in one of its blocks. Right:
exactly one origin, at that step, with that operator, module and phase. (Where an operator before it overflows in float16
already, that is the first, and the trial counts for it.)
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bitwitness as bw

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import nonfinite_zoo as zoo

STEPS = 4
WIDTH, VOCAB = 16, 30
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), 1e-3),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), 1e-3),
    "fused adamw": lambda net: torch.optim.AdamW(net.parameters(), 1e-3, fused=True),
}


class Block(nn.Module):
    """Attention with its mask, and the zoo's faulty layer."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.inner = zoo.Inner(WIDTH)
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, T, width] to the same shape."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if self.attention == "sdpa":
            y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        else:
            mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
            y = ((q @ k.transpose(1, 2) * WIDTH**-0.5).float() + mask).softmax(-1).to(v.dtype) @ v
        x = x + y
        return x + F.gelu(self.inner(x.flatten(0, 1)).view_as(x))


class Net(nn.Module):
    """A small language model; with targets it returns its loss."""

    def __init__(self, layers: int, attention: str, reentrant: bool | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits, or the loss."""
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        logits = self.head(h)
        return logits if targets is None else loss_of(logits, targets)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class Trial:
    """What was drawn."""

    case: zoo.Case
    layers: int
    layer: int
    attention: str
    reentrant: bool | None
    inside: bool
    dtype: torch.dtype | None
    optimizer: str
    micro: int
    step: int

    @classmethod
    def draw(cls, seed: int) -> Trial:
        """Draw one."""
        choice = random.Random(seed)
        layers = choice.randint(1, 5)
        case = choice.choice(zoo.CASES)
        return cls(
            case,
            layers,
            choice.randrange(layers),
            choice.choice(["sdpa", "eager"]),
            choice.choice([None, False, True]),
            choice.random() < 0.5,
            torch.float16 if case.half else choice.choice([None, torch.bfloat16, torch.float16]),
            choice.choice(list(OPTIMIZERS)),
            choice.choice([1, 1, 3]),
            choice.randrange(STEPS),
        )

    @property
    def expected(self) -> set[tuple[int, str, str, str]]:
        """The origins that are right."""
        module = f"blocks.{self.layer}.inner"
        right = {(self.step, self.case.op, module, self.case.phase)}
        if self.case.how == "float8" and self.dtype is torch.float16:
            right.add((self.step, "mul", module, "forward"))  # a million times a half is beyond float16 already
        return right


def run(trial: Trial, seed: int) -> list[tuple[int, str, str, str]]:
    """Train; return the origins found."""
    torch.manual_seed(seed)
    net = Net(trial.layers, trial.attention, trial.reentrant)
    optimizer = OPTIMIZERS[trial.optimizer](net)
    with contextlib.redirect_stderr(io.StringIO()), bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(STEPS):
            for part in range(trial.micro):
                struck = step == trial.step and part == trial.micro - 1
                net.blocks[trial.layer].inner.how = trial.case.how if struck else ""
                tokens, targets = torch.randint(0, VOCAB, (2, 2, 6))
                with torch.autocast("cpu", trial.dtype or torch.bfloat16, enabled=trial.dtype is not None):
                    loss = net(tokens, targets) if trial.inside else loss_of(net(tokens), targets)
                (loss / trial.micro).backward()
            optimizer.step()
            optimizer.zero_grad()
    near = ("extreme", "saturated", "approach")  # float16 coming to its end is told, too
    return [(f.step, f.site.op, f.site.module, f.site.phase) for f in trace.findings if f.evidence["kind"] not in near]


def campaign(trials: int) -> list[str]:
    """Return a line for each trial that went wrong."""
    wrong = []
    for seed in range(trials):
        trial = Trial.draw(seed)
        found = run(trial, seed)
        if len(found) != 1 or found[0] not in trial.expected:
            wrong.append(f"{trial}: found {found}")
    return wrong


def main() -> int:
    """Run it, print what went wrong, write the count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wrong = campaign(args.trials)
    print("\n".join([*wrong, f"{args.trials - len(wrong)} of {args.trials} right"]))
    path = Path(__file__).parent / "results" / "trace_campaign.md"
    if not args.quick:
        count = f"{args.trials - len(wrong)} of {args.trials} right"
        head = (
            f"# Who made the first NaN, on drawn trainings\n\n`python bench/trace_campaign.py --trials {args.trials}`"
        )
        path.write_text(f"{head}: {count}.\n" + "".join(f"- {line}\n" for line in wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
