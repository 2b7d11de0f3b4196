"""A module as a function of its parameters and buffers, so that they are arguments like any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def as_function(fn: Callable[..., Any], like: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function whose first argument is the module's state, if ``fn`` is a module; else ``fn``.

    ``like``: the function on trial, for a reference. A module in the place of a function brings its own state along; a function
    in the place of a module is not given one; two modules share the state of the one on trial where it has the same names.
    """
    tried = isinstance(like, nn.Module)
    if not isinstance(fn, nn.Module):
        return _without_state(fn) if tried else fn
    if like is not None and (not tried or _names(fn) != _names(like)):
        return _with_own_state(fn, given=tried)

    def called(state: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(fn, dict(state), args, kwargs)

    return called


def _names(module: Any) -> list[str]:
    return sorted([*dict(module.named_parameters()), *dict(module.named_buffers())])


def _without_state(fn: Callable[..., Any]) -> Callable[..., Any]:
    def called(state: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001 - the module's alone
        return fn(*args, **kwargs)

    return called


def _with_own_state(module: nn.Module, *, given: bool) -> Callable[..., Any]:
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def called(*args: Any, **kwargs: Any) -> Any:
        state = {name: t.detach().cpu() for name, t in own.items()}
        wide = {name: t.double() if t.is_floating_point() else t for name, t in state.items()}
        return torch.func.functional_call(module, wide, args[1:] if given else args, kwargs)

    return called
