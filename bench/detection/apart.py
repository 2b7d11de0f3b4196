"""Trials of a training that has settled: what is computed beside it leaves no trace, or is a fork's and is thrown away."""

from __future__ import annotations

import gc
import io
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwitness import Guard
from bitwitness.session.forked import lent_to_children


@contextmanager
def unwatched(
    guard: Guard, model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> Iterator[None]:
    """Compute something that is none of the training's: its random states, gradients and buffers are put back."""
    state, random_state = generator.get_state(), torch.get_rng_state()
    buffers = [buffer.clone() for buffer in model.buffers()]
    guard.pause()
    try:
        yield
    finally:
        optimizer.zero_grad()
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)
        generator.set_state(state)
        torch.set_rng_state(random_state)
        guard.resume()


def forked(guard: Guard, call: Callable[[], dict[str, Any]], *, seconds: int = 0) -> dict[str, Any]:
    """Return what a fork of this process computes, in which the guard goes on; ``lost`` where it ended without an answer.

    ``seconds``: how long it may take; 0 for as long as it takes.
    """
    read, write = os.pipe()
    with lent_to_children(guard.session):
        child = os.fork()
    if child == 0:
        try:
            gc.disable()
            signal.alarm(seconds)
            answer = io.BytesIO()
            torch.save(call(), answer)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(answer.getvalue())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return torch.load(io.BytesIO(text)) if text else {"lost": True}


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return copies of tensors as one float64 vector; by numpy, since an emulated device strikes torch's casts here, too."""
    return torch.from_numpy(np.concatenate([t.detach().numpy().astype(np.float64).ravel() for t in tensors]))


def relative_error(good: torch.Tensor, bad: torch.Tensor) -> float:
    """Return the L2 norm of the difference over that of ``good``; infinite where it is not a number. By numpy, as `flat`."""
    error = float(np.linalg.norm(bad.numpy() - good.numpy()) / np.linalg.norm(good.numpy()))
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN
