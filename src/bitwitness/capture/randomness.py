"""The global random state that a forward draws from: torch (host and every device), NumPy, Python."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from bitwitness.tap.ownwork import replaying

_left_alone: ContextVar[bool] = ContextVar("bitwitness_randomness_left_alone", default=False)


@dataclass(frozen=True, slots=True)
class RandomState:
    """One moment of all global generators.

    ``device`` is None on a CPU run; ``numpy`` where NumPy was not imported. ``others`` are the generators of the other
    devices of the same type in this process, by index: a model may be spread over several.
    """

    host: torch.Tensor
    device: torch.Tensor | None
    device_type: str
    numpy: tuple[Any, ...] | None
    python: tuple[Any, ...]
    others: tuple[tuple[int, torch.Tensor], ...] = ()

    @classmethod
    def read(cls, device: torch.device) -> RandomState:
        """Read the generators; none of them is advanced, and no device is waited for."""
        numpy = sys.modules.get("numpy")
        here, others = _device_states(device)
        return cls(
            host=torch.get_rng_state(),
            device=here,
            device_type=device.type,
            numpy=None if numpy is None else numpy.random.get_state(),
            python=random.getstate(),
            others=others,
        )

    def equals(self, other: RandomState) -> bool:
        """Tell whether two moments are the same."""
        mine, theirs = self._tensors(), other._tensors()
        return (
            len(mine) == len(theirs)
            and all(map(torch.equal, mine, theirs))
            and self.python == other.python
            and _same_of_numpy(self.numpy, other.numpy)
        )

    def _tensors(self) -> list[torch.Tensor]:
        return [self.host, *([] if self.device is None else [self.device]), *(state for _, state in self.others)]

    def restore(self, device: torch.device) -> None:
        """Set the generators to this moment; what runs inside `randomness_kept` may have to leave them to other threads."""
        if _left_alone.get():
            return
        torch.set_rng_state(self.host)
        if self.device is not None and device.type != "cpu":
            module = torch.get_device_module(device)
            module.set_rng_state(self.device, device)
            for index, state in self.others:
                module.set_rng_state(state, torch.device(device.type, index))
        numpy = sys.modules.get("numpy")
        if self.numpy is not None and numpy is not None:
            numpy.random.set_state(self.numpy)
        random.setstate(self.python)


def _same_of_numpy(a: tuple[Any, ...] | None, b: tuple[Any, ...] | None) -> bool:
    """Compare two states of NumPy's legacy generator: its name, 624 words, a position and a normal number kept back."""
    if a is None or b is None:
        return a is b
    return a[0] == b[0] and a[2:] == b[2:] and bool((a[1] == b[1]).all())


def _device_states(device: torch.device) -> tuple[torch.Tensor | None, tuple[tuple[int, torch.Tensor], ...]]:
    if device.type == "cpu":
        return None, ()
    module = torch.get_device_module(device)
    current = device.index if device.index is not None else module.current_device()
    others = (index for index in range(module.device_count()) if index != current)
    return (
        module.get_rng_state(device),
        tuple((index, module.get_rng_state(torch.device(device.type, index))) for index in others),
    )


def left_alone() -> bool:
    """Tell whether the generators are other threads', too, so that they say nothing of what runs here."""
    return _left_alone.get()


@contextmanager
def randomness_kept(device: torch.device, *, shared: bool) -> Iterator[None]:
    """Leave the global generators afterwards as they were before: what runs inside is no part of the training.

    They are the process's. Where they are ``shared`` with another thread of the script, which may draw from them meanwhile,
    they are neither set nor put back; what draws is not run inside then (`shared_generators`).
    """
    before = None if shared else RandomState.read(device)
    token = _left_alone.set(shared or left_alone())
    try:
        with replaying():
            yield
    finally:
        _left_alone.reset(token)
        if before is not None:
            before.restore(device)
