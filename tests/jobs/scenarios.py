"""Trainings of many kinds, each small, deterministic and written as a user would: models, loops, wrappers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bitwitness.demo.model import ByteGPT


class ConvNet(nn.Module):
    """Convolutions, BatchNorm, dropout; returns logits, so that the loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 10))

    def forward(self, x):
        return self.head(self.body(x))


class Recurrent(nn.Module):
    """An LSTM tagger; returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(24, 50)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


class SometimesUnused(nn.Module):
    """Uses one of its two branches, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head = nn.Linear(12, 4)
        self.calls = 0

    def forward(self, x, which: int):
        return self.head(torch.relu(self.branches[which](x))).square().mean()


def hugging_face() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


@dataclass(frozen=True)
class Scenario:
    """One training. ``model`` names a kind; the rest says how it is trained."""

    model: str
    accumulate: int = 1
    clip: float | None = None
    scaler: bool = False
    autocast: torch.dtype | None = None
    optimizer: str = "adamw"
    ddp: dict[str, Any] = field(default_factory=dict)
    set_to_none: bool = True
    steps: int = 5

    def __str__(self) -> str:
        parts = [self.model, self.optimizer, *(f"{k}={v}" for k, v in self.ddp.items())]
        settings = ("accumulate", "clip", "scaler", "autocast", "set_to_none")
        changed = [name for name in settings if getattr(self, name) != Scenario.__dataclass_fields__[name].default]
        return " ".join(parts + [f"{name}={getattr(self, name)}" for name in changed])


def build(kind: str) -> nn.Module:
    if kind == "gpt":
        return ByteGPT(width=32, layers=2, heads=2, context=16)
    makers = {"conv": ConvNet, "lstm": Recurrent, "hf": hugging_face, "unused": SometimesUnused}
    return makers[kind]()


def loss_of(kind: str, model: nn.Module, generator: torch.Generator, turn: int) -> torch.Tensor:
    """Draw a batch and compute the loss, inside the model or outside as the kind has it."""
    if kind == "gpt":
        text = torch.randint(0, 256, (3, 17), generator=generator)
        return model(text[:, :-1], text[:, 1:])
    if kind == "conv":
        x = torch.randn(6, 3, 12, 12, generator=generator)
        return F.cross_entropy(model(x), torch.randint(0, 10, (6,), generator=generator))
    if kind == "lstm":
        tokens = torch.randint(0, 50, (4, 9), generator=generator)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    if kind == "unused":
        return model(torch.randn(5, 12, generator=generator), turn % 2)
    tokens = torch.randint(0, 128, (2, 12), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


def seeded(kind: str) -> nn.Module:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return build(kind)


def train(scenario: Scenario, guard: Callable[[nn.Module, torch.optim.Optimizer], Any] | None = None) -> list[str]:
    """Train; return a line of bits per step (losses, weights, buffers, random state), to be compared."""
    inner = seeded(scenario.model)
    ranks = dist.is_initialized() and dist.get_world_size() > 1
    model = DistributedDataParallel(inner, **scenario.ddp) if ranks else inner
    optimizer = OPTIMIZERS[scenario.optimizer](model.parameters())
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(7 + rank)
    torch.manual_seed(100 + rank)
    scaler = torch.amp.GradScaler("cpu", enabled=scenario.scaler, init_scale=2.0**12)
    lines = []
    with guard(model, optimizer) if guard is not None else nullcontext():
        for step in range(scenario.steps):
            losses = []
            for micro in range(scenario.accumulate):
                last = micro == scenario.accumulate - 1
                with nullcontext() if last or not ranks else model.no_sync():
                    cast = torch.autocast("cpu", dtype=scenario.autocast) if scenario.autocast else nullcontext()
                    with cast:
                        loss = loss_of(scenario.model, model, generator, step) / scenario.accumulate
                    scaler.scale(loss).backward()
                losses.append(float(loss.detach()))
            if scenario.clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=scenario.set_to_none)
            lines.append(bits(inner, losses, optimizer))
    return lines


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of their bytes, made without torch's operators: a device that is emulated computes those slowly."""
    whole = hashlib.sha256()
    for tensor in tensors:
        kept = tensor.detach()
        whole.update((kept.view(torch.int16) if kept.dtype == torch.bfloat16 else kept).numpy().tobytes())
    return whole.hexdigest()


def bits(model: nn.Module, losses: list[float], optimizer: torch.optim.Optimizer) -> str:
    """Return everything a guard must not change, as one line."""
    held = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        held += [value for value in state.values() if isinstance(value, torch.Tensor)]
    state = (
        torch.get_rng_state().sum().item(),
        random.getstate()[1][:3],
        np.random.get_state()[1][:3].tolist(),
    )
    return f"{[loss.hex() for loss in losses]} {fingerprint(held)} {state}"


SINGLE = [
    Scenario("gpt", clip=1.0, autocast=torch.bfloat16),
    Scenario("gpt", accumulate=3),
    Scenario("gpt", optimizer="fused", set_to_none=False),
    Scenario("conv", optimizer="sgd"),
    Scenario("conv", scaler=True, clip=0.5, autocast=torch.float16),
    Scenario("lstm", clip=0.1),
    Scenario("hf", autocast=torch.bfloat16),
    Scenario("unused"),
]

RANKS = [
    Scenario("gpt", clip=1.0, autocast=torch.bfloat16),
    Scenario("gpt", ddp={"static_graph": True}),
    Scenario("gpt", accumulate=3),
    Scenario("gpt", ddp={"gradient_as_bucket_view": True}),
    Scenario("conv", optimizer="sgd", clip=0.5),
    Scenario("conv", scaler=True, autocast=torch.float16),
    Scenario("lstm", accumulate=2, set_to_none=False),
    Scenario("hf", accumulate=2),
    Scenario("unused", ddp={"find_unused_parameters": True}),
]
