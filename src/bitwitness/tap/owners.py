"""Whose optimizers and modules these are: do they hold the root's parameters, some or all."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary


class Owners:
    """Tells optimizers and modules that concern a root from others; finds out once for each.

    Parameters
    ----------
    parameters
        The root's.
    optimizers
        Those that count; None takes every one that holds one of the parameters.

    """

    def __init__(self, parameters: Iterable[nn.Parameter], optimizers: list[Optimizer] | None) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._optimizers = optimizers
        self._known = WeakIdKeyDictionary()
        self._covering = WeakIdKeyDictionary()

    def ours(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer's steps count."""
        if self._optimizers is not None:
            return any(optimizer is known for known in self._optimizers)
        if optimizer not in self._known:
            self._known[optimizer] = not self._parameters.isdisjoint(_held(optimizer))
        return bool(self._known[optimizer])

    def knows(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer was asked about before."""
        return optimizer in self._known

    def covers(self, owner: Optimizer | nn.Module) -> bool:
        """Tell whether all of the root's parameters are an optimizer's or a module's."""
        if owner not in self._covering:
            self._covering[owner] = self._parameters <= _held(owner)
        return bool(self._covering[owner])


def _held(owner: Optimizer | nn.Module) -> set[int]:
    if isinstance(owner, nn.Module):
        return {id(p) for p in owner.parameters()}
    return {id(p) for group in owner.param_groups for p in group["params"]}


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Return every optimizer of the process that holds one of a model's parameters; looks at all objects, 0.1 s or so."""
    parameters = {id(parameter) for parameter in model.parameters()}
    # Types are asked, and not the objects: isinstance runs code of lazy proxies among them.
    optimizers = [
        thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer) and hasattr(thing, "param_groups")
    ]
    return [optimizer for optimizer in optimizers if not parameters.isdisjoint(_held(optimizer))]
