"""Which optimizers step which watched models, as a script goes on."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.guard.face import Face
from bitwitness.guard.unguarded import parameters_of


class Steppers:
    """Remembers who steps whom."""

    def __init__(self) -> None:
        self._stepped: set[int] = set()
        self._of: dict[Face, WeakSet[Optimizer]] = {}

    def stepped(self, optimizer: Optimizer, watchers: list[Face]) -> None:
        """Note an optimizer's step."""
        self._stepped |= set(map(id, parameters_of(optimizer)))
        for watcher in watchers:
            self.note(watcher, optimizer)

    def note(self, watcher: Face, optimizer: Optimizer) -> None:
        """Note that an optimizer steps the model of a watcher, if it does."""
        if not set(map(id, parameters_of(optimizer))).isdisjoint(map(id, watcher.model.parameters())):
            self._of.setdefault(watcher, WeakSet()).add(optimizer)

    def step(self, module: nn.Module) -> bool:
        """Tell whether any optimizer has stepped a parameter of a module."""
        return bool(self._stepped) and not self._stepped.isdisjoint(map(id, module.parameters()))

    def are_gone(self, watcher: Face) -> bool:
        """Tell whether all optimizers that stepped a model are gone: a copy that was trained for a few steps, say."""
        return watcher in self._of and not self._of[watcher]

    def forget(self, watcher: Face) -> None:
        """Forget who stepped the model of a watcher."""
        self._of.pop(watcher, None)
