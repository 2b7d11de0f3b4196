"""The global random state that a forward draws from: torch (host and device), NumPy, Python."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """One moment of all global generators. ``device`` is None on a CPU run; ``numpy`` where NumPy was not imported."""

    host: torch.Tensor
    device: torch.Tensor | None
    device_type: str
    numpy: tuple[Any, ...] | None
    python: tuple[Any, ...]

    @classmethod
    def read(cls, device: torch.device) -> RandomState:
        """Read the generators; none of them is advanced, and no device is waited for."""
        numpy = sys.modules.get("numpy")
        return cls(
            host=torch.get_rng_state(),
            device=None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
            device_type=device.type,
            numpy=None if numpy is None else numpy.random.get_state(),
            python=random.getstate(),
        )

    def restore(self, device: torch.device) -> None:
        """Set the generators to this moment."""
        torch.set_rng_state(self.host)
        if self.device is not None and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(self.device, device)
        numpy = sys.modules.get("numpy")
        if self.numpy is not None and numpy is not None:
            numpy.random.set_state(self.numpy)
        random.setstate(self.python)


_replaying: ContextVar[bool] = ContextVar("bitwitness_replaying", default=False)


@contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """Leave the global generators afterwards as they were before: what runs inside is no part of the training."""
    before = RandomState.read(device)
    token = _replaying.set(True)
    try:
        yield
    finally:
        _replaying.reset(token)
        before.restore(device)


def in_replay() -> bool:
    """Tell whether a step is being run again, so that what runs now is not the training itself."""
    return _replaying.get()
