"""Recorded training steps that end as most scripts' do: the optimizer steps, and gradients are zeroed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bitwitness as bw


def recorded_steps(
    out: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[int], None],
    steps: int,
    **settings: Any,
) -> Path:
    """Record some steps; ``backward``: computes one's gradients, and does to them whatever comes before the update."""
    with bw.Recorder(model, out=str(out), **settings):
        for step in range(steps):
            backward(step)
            optimizer.step()
            optimizer.zero_grad()
    return out
