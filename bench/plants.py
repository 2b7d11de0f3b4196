"""Twelve mistakes and faults, each planted into one of two runs of a small GPT, for `side_by_side.py`.

    python bench/plants.py PLANT a|b --tool own|peer --out DIR

Imports torch and the model only, so that it runs where a tool is installed. Run A is healthy and has nothing planted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, by_hand
from rounds import Job
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

STEPS, STRUCK = 3, 1
VOCAB, WIDTH, TIME = 64, 32, 16


class Training:
    """A GPT with attention by hand, AdamW and clipping; every field is there to be turned by a plant."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(VOCAB, WIDTH, 2, 2, TIME, eager=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randint(0, VOCAB, (4, TIME + 1), generator=generator) for _ in range(STEPS)]
        self.clip, self.zeroes = 1.0, True
        self.broken: TorchDispatchMode | None = None

    def step(self, number: int) -> None:
        """Train one step."""
        if isinstance(self.broken, Broken):
            self.broken.begin(number)
        tokens = self.batches[number]
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        if self.zeroes:
            self.optimizer.zero_grad()


class Broken(TorchDispatchMode):
    """A device that multiplies a 4 x 4 tile of one call of an operator in one step by a thousand; beneath what looks on."""

    def __init__(self, op: str, call: int) -> None:
        super().__init__()
        self._op, self._call = op, call
        self._step, self._calls = -1, 0

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._step, self._calls = step, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and break its result if it is the one."""
        result = func(*args, **kwargs or {})
        if self._step == STRUCK and func.overloadpacket.__name__ == self._op:
            if self._calls == self._call:
                result[..., :4, :4] *= 1000.0
            self._calls += 1
        return result


# -- plants ------------------------------------------------------------------------------------------------------


def weight_row(run: Training) -> None:
    """Make a row of a weight 1.5 times as large."""
    with torch.no_grad():
        run.model.blocks[1].fc1.weight[3] *= 1.5


def epsilon(run: Training) -> None:
    """Give one norm another epsilon."""
    run.model.blocks[1].ln2.eps = 1e-2


def gelu(run: Training) -> None:
    """Have the last block's activation approximated."""
    block = run.model.blocks[1]

    def forward(x: torch.Tensor) -> torch.Tensor:
        batch, time, d = x.shape
        parts = block.qkv(block.ln1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, time, block.heads, d // block.heads).transpose(1, 2) for part in parts)
        y = by_hand(q, k, v)
        x = x + block.proj(y.transpose(1, 2).reshape(batch, time, d))
        return x + block.fc2(F.gelu(block.fc1(block.ln2(x)), approximate="tanh"))

    block.forward = forward


def positions(run: Training) -> None:
    """Shift the position embedding by one."""
    with torch.no_grad():
        run.model.pos.weight.copy_(run.model.pos.weight.roll(1, 0))


def product(run: Training) -> None:
    """Break a tile of the second block's first product of the MLP (the seventh of the step's linears)."""
    run.broken = Broken("addmm", 6)


def backward_product(run: Training) -> None:
    """Break a tile of the third product of the backward: the gradient that the last block's fc2 hands on."""
    run.broken = Broken("mm", 3)


def hooked(run: Training) -> None:
    """Have a hook scale one weight's gradient by 1.1."""
    run.model.blocks[0].proj.weight.register_hook(lambda gradient: gradient * 1.1)


def clipping(run: Training) -> None:
    """Clip to half."""
    run.clip = 0.5


def kept(run: Training) -> None:
    """Forget zero_grad."""
    run.zeroes = False


def rate(run: Training) -> None:
    """Give the second block's parameters ten times the rate."""
    second = list(run.model.blocks[1].parameters())
    others = [one for one in run.model.parameters() if all(one is not other for other in second)]
    run.optimizer = torch.optim.AdamW([{"params": others}, {"params": second, "lr": 1e-2}], lr=1e-3)


def batch(run: Training) -> None:
    """Draw another batch for a later step."""
    run.batches[STRUCK] = run.batches[STRUCK].roll(1, 1)


def untied(run: Training) -> None:
    """Give the head a weight of its own, of equal values."""
    run.model.head.weight = nn.Parameter(run.model.tok.weight.detach().clone())
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Plant:
    """A plant: what it does to run B, and what the first place has to be named like, in either tool's spelling.

    ``everywhere``: it concerns all gradients, and a report has to say so.
    """

    turn: Callable[[Training], None]
    place: str
    step: int = 0
    everywhere: bool = False


PLANTS = {
    "weight row x 1.5": Plant(weight_row, r"blocks\.1\.fc1"),
    "epsilon of a norm": Plant(epsilon, r"blocks\.1\.ln2"),
    "gelu approximated": Plant(gelu, r"gelu|blocks\.1\.(Block|fc2)"),
    "positions shifted": Plant(positions, r"(^|[./])pos\b|\./add#|\./slice#|Tensor\.__(add|getitem)__"),
    "tile of a product": Plant(product, r"blocks\.1\.fc1", STRUCK),
    "tile of a backward product": Plant(backward_product, r"blocks\.1\.fc2", STRUCK),
    "hook on a gradient": Plant(hooked, r"blocks\.0\.proj"),
    "clipped to half": Plant(clipping, r"gradients#0:grad\.read", everywhere=True),
    "zero_grad forgotten": Plant(kept, r"gradients#0:grad\.local", 1, everywhere=True),
    "rate of a group": Plant(rate, r"blocks\.1\..*optim"),
    "another batch": Plant(batch, r"(^|[./])tok\b", STRUCK),
    "head untied": Plant(untied, r"(^|[./])head\b"),
}


def main() -> None:
    """Train one run, recorded by a tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plant", choices=PLANTS)
    parser.add_argument("run", choices=("a", "b"))
    parser.add_argument("--tool", choices=("own", "peer"), default="own")
    parser.add_argument("--content", choices=("stats", "tensors"), default="stats")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.tool == "own":
        from record_own import opened
    else:
        from record_peer import opened  # type: ignore[assignment]
    run = Training()
    if args.run == "b":
        PLANTS[args.plant].turn(run)
    torch.set_num_threads(1)
    job = Job(args.plant, content=args.content)
    with run.broken or nullcontext(), opened(job, run.model, args.out) as recording:
        recording.begin()
        for number in range(STEPS):
            recording.before_step()
            run.step(number)
            recording.after_step()
        recording.end()


if __name__ == "__main__":
    main()
