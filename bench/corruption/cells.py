"""Which trainings are struck: model, precision, how many ranks and how the model is shared among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from detection.subjects import CONTEXT, Llama, Subject
from detection.subjects import SUBJECTS as TRAININGS
from torch import nn
from torch.utils.checkpoint import checkpoint

from bitwitness.demo.model import ByteGPT

WATCHFUL, BUDGET = "every step", "default budget"
"""Everything on every step; or what one percent of the training's time buys."""
MODES = (WATCHFUL, BUDGET)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map as the block does."""
        result: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def _checkpointed(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        model.layers = nn.ModuleList(Checkpointed(block) for block in model.layers)
        return model  # type: ignore[no-any-return]

    return made


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Cell:
    """One training: ``ways`` of several ranks are ``ddp``, ``fsdp2`` and ``hsdp``; one rank has none."""

    subject: Subject
    ranks: int = 1
    way: str = ""

    @property
    def name(self) -> str:
        """What tables call it."""
        shared = f", {self.ranks} ranks {self.way.upper()}" if self.ranks > 1 else ""
        return self.subject.name + shared

    @property
    def dtype(self) -> str:
        """The precision that it computes in."""
        return "bf16" if self.subject.autocast is not None else "fp32"

    @property
    def parallelism(self) -> str:
        """How the model is shared."""
        return f"{self.ranks} x {self.way.upper()}" if self.ranks > 1 else "one process"


def _small(name: str, autocast: torch.dtype | None = None) -> Subject:
    return Subject(name, lambda: ByteGPT(width=32, layers=2, heads=2, context=CONTEXT), _adamw, autocast, size=2)


_GPT, _LLAMA, _CONV, _LSTM = TRAININGS
ALONE = (
    Cell(_GPT),
    Cell(replace(_GPT, name="GPT, fp32, AdamW", autocast=None)),
    Cell(replace(_LLAMA, name="Llama-style, checkpointed, fp32, AdamW", model=_checkpointed(Llama))),
    Cell(replace(_LLAMA, name="Llama-style, bf16 autocast, AdamW", autocast=torch.bfloat16)),
    Cell(_CONV),
    Cell(_LSTM),
)
"""Trainings of one process."""
GROUPS = (
    Cell(_small("small GPT, fp32, AdamW"), 2, "ddp"),
    Cell(_small("small GPT, bf16 autocast, AdamW", torch.bfloat16), 4, "ddp"),
    Cell(_small("small GPT, fp32, AdamW"), 2, "fsdp2"),
    Cell(_small("small GPT, fp32, AdamW"), 4, "hsdp"),
)
"""Trainings of several."""
