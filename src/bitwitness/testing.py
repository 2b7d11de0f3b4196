"""``bw.testing``: try your own training stack, on a device that computes wrongly and on a healthy one.

::

    fault = bw.testing.Fault(kind="multiply", factor=1e4, site="layers.1.mlp.up/addmm:forward", from_step=7)
    with bw.testing.FaultyDevice([fault]) as device:
        train()
    device.fired                      # what struck

    found = bw.testing.run_twice(train)   # plain, and under a guard that questions every step
    assert found.untouched, found
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.errors import UsageError
from bitwitness.finding import Verdict
from bitwitness.guard.guard import Guard
from bitwitness.inject.device import FaultyDevice
from bitwitness.inject.faults import Fault, from_mapping, load_faults
from bitwitness.tap.randomness import RandomState

__all__ = ["EVERY_STEP", "CleanRun", "Fault", "FaultyDevice", "from_mapping", "load_faults", "run_twice"]

EVERY_STEP: Mapping[str, Any] = MappingProxyType(
    {"trend": {"z": 1e-9, "warmup": 1}, "replay": {"rest": False}, "self_test": False}
)
"""Settings under which a guard questions every step after the second: whatever it may disturb, it disturbs then."""

Watch = Callable[[nn.Module, Optimizer | None], AbstractContextManager[Any]]


@dataclass(frozen=True)
class CleanRun:
    """What came of training twice on a healthy device.

    Attributes
    ----------
    differing
        Names of what has other bits after the guarded run: entries of the model's ``state_dict``, ``random states``.
    verdicts
        What the guard concluded; nothing is right on a healthy device.
    coverage
        What the guard looked at, and what not (`Guard.coverage`).

    """

    differing: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    coverage: Mapping[str, Any] = field(repr=False)

    @property
    def untouched(self) -> bool:
        """Whether the guard changed nothing and accused nobody."""
        return not self.differing and not self.verdicts


def run_twice(train: Callable[[Watch], nn.Module], **settings: Any) -> CleanRun:
    """Train twice from the same random states, without a guard and under one, and compare all bits.

    Parameters
    ----------
    train
        Makes a model, trains it inside ``with watch(model, optimizer):`` and returns it. It is called twice, and what it
        reads and writes besides (files, globals) must be the same both times.
    **settings
        Of the guard, besides `EVERY_STEP`; ``act="protect"``, say.

    Raises
    ------
    UsageError
        If ``train`` did not use ``watch`` exactly once, or returned no module.

    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    guards: list[Guard] = []

    def guarded(model: nn.Module, optimizer: Optimizer | None = None) -> Guard:
        guards.append(Guard(model, optimizer, **{**EVERY_STEP, **settings}))
        return guards[-1]

    def unguarded(_model: nn.Module, _optimizer: Optimizer | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    before = RandomState.read(device)
    plain, end = _state(train(unguarded)), RandomState.read(device)
    before.restore(device)
    watched = _state(train(guarded))
    if len(guards) != 1:
        raise UsageError(f"train(watch) entered watch(model, optimizer) {len(guards)} times; expected once")
    differing = [name for name in {**plain, **watched} if not _same(plain.get(name), watched.get(name))]
    if not end.equals(RandomState.read(device)):
        differing.append("random states")
    return CleanRun(tuple(differing), tuple(guards[0].verdicts), guards[0].coverage())


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    if not isinstance(model, nn.Module):
        raise UsageError(f"train(watch) returned {type(model).__name__}; expected the trained module")
    values = model.state_dict()
    return {name: value.detach().clone() for name, value in values.items() if isinstance(value, torch.Tensor)}


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Compare bits: NaN equals the same NaN, and 0.0 is not -0.0."""
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(value.cpu().contiguous().reshape(-1).view(torch.uint8) for value in (a, b)))
