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

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.capture.randomness import RandomState
from bitwitness.comparison.measuring.tensors import same_bits
from bitwitness.errors import TrainingStopped, UsageError
from bitwitness.finding import Verdict
from bitwitness.guard.guard import Guard
from bitwitness.inject.device import FaultyDevice
from bitwitness.inject.faults import Fault, from_mapping, load_faults
from bitwitness.respond.final import PROCESS

__all__ = ["EVERY_STEP", "CleanRun", "Fault", "FaultyDevice", "contained", "from_mapping", "load_faults", "run_twice"]

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
    repeats
        Whether plain trainings have equal bits among themselves: where not, the guard is not to blame. Found out only where
        something differs.
    stopped
        Why the guard stopped the training; None where it did not.
    coverage
        What the guard looked at, and what not (`Guard.coverage`).

    """

    differing: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    repeats: bool = True
    stopped: str | None = None
    coverage: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def untouched(self) -> bool:
        """Whether the guard changed nothing and concluded nothing."""
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
        If ``train`` did not use ``watch`` exactly once, took no step in it, or returned no module.

    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    guards: list[Guard] = []

    @contextmanager
    def quiet(guard: Guard) -> Iterator[Guard]:
        with guard:  # every step is suspected, on purpose: nobody wants to read that
            assert guard.reporter is not None  # noqa: S101 - it is on
            guard.reporter.say = lambda text: None  # type: ignore[method-assign] # noqa: ARG005
            yield guard

    def guarded(model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[Guard]:
        guard = Guard(model, optimizer, **{**EVERY_STEP, **settings})
        guards.append(guard)
        return quiet(guard)

    def unguarded(_model: nn.Module, _optimizer: Optimizer | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    before = RandomState.read(device)
    plain, end = _state(train(unguarded)), RandomState.read(device)
    before.restore(device)
    stopped: str | None = None
    watched: dict[str, torch.Tensor] = {}
    with contained():
        try:
            watched = _state(train(guarded))
        except TrainingStopped as stop:
            stopped = stop.reason
    if len(guards) != 1:
        raise UsageError(f"train(watch) entered watch(model, optimizer) {len(guards)} times; expected once")
    coverage = guards[0].coverage()
    if not coverage["steps"]["held"]:
        raise UsageError("the guard saw no step: train(watch) has to train inside `with watch(model, optimizer):`")
    differing = _differing(plain, watched, end.equals(RandomState.read(device)))
    repeats = True
    if differing and stopped is None:
        before.restore(device)
        repeats = not _differing(plain, _state(train(unguarded)), end.equals(RandomState.read(device)))
    return CleanRun(differing, tuple(guards[0].verdicts), repeats, stopped, coverage)


@contextmanager
def contained() -> Iterator[None]:
    """Let a guard's stop be an ordinary `TrainingStopped` inside, for those who run many trainings in one process, as tests do.

    Otherwise a stop is final: whoever catches it gets it again from the next training of the process, and the process ends
    with its exit code.
    """
    with PROCESS.contained():
        yield


def _differing(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], same_random: bool
) -> tuple[str, ...]:
    both = one.keys() & other.keys()
    names = [name for name in {**one, **other} if name not in both or not same_bits(one[name], other[name])]
    return (*names, *(() if same_random else ("random states",)))


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    if not isinstance(model, nn.Module):
        raise UsageError(f"train(watch) returned {type(model).__name__}; expected the trained module")
    values = model.state_dict()
    return {name: value.detach().clone() for name, value in values.items() if isinstance(value, torch.Tensor)}
