"""Which modules are under guard now: a second guard on one of them is refused, and each judges its own parameters."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

_guarded: WeakSet[nn.Module] = WeakSet()


def add_root(root: nn.Module) -> None:
    """Say that a module is under guard."""
    _guarded.add(root)


def discard_root(root: nn.Module) -> None:
    """Say that it is not any more."""
    _guarded.discard(root)


def guarded_roots() -> list[nn.Module]:
    """Return the modules that are under guard now."""
    return list(_guarded)


def unguarded_among(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return those parameters that no guard watches."""
    watched = {id(p) for root in _guarded for p in root.parameters()} if parameters else set()
    return [p for p in parameters if id(p) not in watched]
