"""Which module is a training's root: the outermost one, whether it is called or its methods walk its parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy

from bitwitness.ranks.process_groups import wrapped_by, wrappers_inside
from bitwitness.tap.compat import running_wrapper
from bitwitness.tap.compiled import distributed, is_compiled
from bitwitness.tap.modules import unwrap


class Blocks(nn.ModuleList):
    """Modules that a script calls one after the other, and that no module of its own holds together."""


def root_of(module: nn.Module) -> nn.Module | None:
    """Return what is to be guarded when ``module`` is called now; None where that is not the training's call.

    It is the smallest module that holds all trainable parameters of the outermost one, among ``module`` and those whose
    methods are running around the call. A DistributedDataParallel stands alone: what holds it is reduced in part only.
    Not the training's are calls inside the constructor of a module (it looks for a size), the dry run that makes the
    parameters of lazy modules, and calls past a wrapper, which reduce nothing.
    """
    if distributed(module) is not None:
        return None if any(map(is_lazy, module.parameters())) else module
    candidates = [] if wrappers_inside(module) else [module]
    for owner, function in _owners(module):
        if function == "__init__":
            return None
        if not wrappers_inside(owner):
            candidates.append(owner)
    if not candidates or wrapped_by(unwrap(module)) is not None:
        return None
    wanted = trainable(candidates[-1])
    if any(map(is_lazy, candidates[-1].parameters())):
        return None
    return next(owner for owner in candidates if wanted <= trainable(owner))


def trains_past_wrapper(module: nn.Module) -> bool:
    """Tell whether a call trains a model past the DistributedDataParallel that is around it, which then reduces nothing."""
    trains = torch.is_grad_enabled() and unwrap(module).training and running_wrapper() is None
    return trains and distributed(module) is None and wrapped_by(unwrap(module)) is not None


def trainable(module: nn.Module) -> set[int]:
    """Return the identities of a module's trainable parameters."""
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def contents(module: nn.Module) -> frozenset[tuple[int, bool]]:
    """Return what a module is made of, and which parts are compiled: anything else means that it was rebuilt."""
    parts = ((id(part), is_compiled(part)) for part in module.modules())
    return frozenset((*parts, *((id(parameter), False) for parameter in module.parameters())))


def is_entered(module: nn.Module) -> bool:
    """Tell whether a call of ``module`` is under way in this thread."""
    return any(
        frame.f_code.co_filename == nn_module.__file__ and frame.f_locals.get("self") is module for frame in _frames()
    )


def _owners(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Walk the modules around ``module`` whose methods are running, from the inside out, each once with every method."""
    seen: dict[int, bool] = {id(module): False}
    for frame in _frames():
        code = frame.f_code
        if not code.co_argcount or code.co_varnames[0] != "self":
            continue
        owner = frame.f_locals.get("self")
        if owner is None or not issubclass(type(owner), nn.Module) or "_modules" not in vars(owner):
            continue
        if id(owner) not in seen:
            seen[id(owner)] = any(part is module for part in owner.modules())
        if seen[id(owner)]:
            yield owner, code.co_name


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
