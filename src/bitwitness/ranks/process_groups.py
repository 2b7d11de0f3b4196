"""Which ranks train a model together, and which wrappers reduce its gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from bitwitness.ranks import Alone, Ranks, SideChannel
from bitwitness.tap.compat import running_wrapper
from bitwitness.tap.compiled import distributed
from bitwitness.tap.sharded import sharding_of
from bitwitness.tap.threads import elsewhere, wait_while_elsewhere

_wrappers: WeakSet[DistributedDataParallel] = WeakSet()

_MODULES = nn.Module.__setattr__.__code__.co_filename
Wrapped = Callable[[DistributedDataParallel, nn.Module], None]
_whole: WeakSet[nn.Module] = WeakSet()  # models whose parameters were whole on every rank when they were guarded
_told: list[tuple[Wrapped, Callable[[], None]]] = []
_hook: RemovableHandle | None = None


def join_ranks(model: nn.Module, deadline_s: float) -> Ranks:
    """Return the side channel among the ranks that train ``model`` together, or `Alone`."""
    if (wrapper := distributed(model)) is not None:
        group = wrapper.process_group
        return SideChannel(group, deadline_s=deadline_s) if dist.get_world_size(group) > 1 else Alone(_number())
    sharding = sharding_of(model)
    (_whole.discard if sharding.spread else _whole.add)(model)
    if sharding.spread and dist.is_initialized() and dist.get_world_size(sharding.group()) > 1:
        return SideChannel(sharding.group(), deadline_s=deadline_s)
    return Alone(_number())


def _number() -> int:
    """Return this process's number in its job, whatever that trains together."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_alone(model: nn.Module) -> bool:
    """Tell whether nothing in or around ``model`` is there for several ranks."""
    return not wrappers_inside(model) and not sharding_of(model).spread


@contextmanager
def wrappers_noticed(tell: Wrapped | None = None, built: Callable[[], None] | None = None) -> Iterator[None]:
    """Notice every DistributedDataParallel that is made meanwhile, and those that are there in a job of several ranks.

    Parameters
    ----------
    tell
        Called with each new wrapper, which is not finished yet, and the module that it wraps.
    built
        Called whenever a module is put into another, as when a model is made.

    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # The exact type is looked up: isinstance would run code of lazy proxies among those hundreds of thousands of objects,
        # and issubclass that of DistributedDataParallel's abstract base, a second in all.
        kinds = set(_with_subclasses(DistributedDataParallel))
        _wrappers.update(thing for thing in gc.get_objects() if type(thing) in kinds)

    global _hook  # noqa: PLW0603 - one for all: torch iterates over these hooks as one of us lets a guard go
    listener = tell or _nobody, built or _nothing
    _told.append(listener)
    if _hook is None:
        wait_while_elsewhere(_builds)
    _hook = _hook or register_module_module_registration_hook(_registered)
    try:
        yield
    finally:
        _told.remove(listener)
        if not _told and _hook is not None and not elsewhere(_builds):
            _hook.remove()
            _hook = None


def _with_subclasses(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [kind, *(found for child in children for found in _with_subclasses(child))]


def _builds(frame: FrameType | None) -> bool:
    """Tell whether a thread is putting a module into another, where torch goes through its hooks as they are."""
    while frame is not None:
        if frame.f_code.co_filename == _MODULES and frame.f_code.co_name in ("__setattr__", "add_module"):
            return True
        frame = frame.f_back
    return False


def _nobody(_wrapper: DistributedDataParallel, _module: nn.Module) -> None:
    """Stand for one who only wants wrappers to be known."""


def _nothing() -> None:
    """Stand for one who does not want to know of other modules."""


def _registered(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    for _, built in _told:
        built()
    if name == "module" and isinstance(owner, DistributedDataParallel) and module is not None:
        _wrappers.add(owner)
        for tell, _ in _told:
            tell(owner, module)


def wrapped_later(model: nn.Module) -> bool:
    """Tell whether gradients are reduced by what was made around, in or of the model after it was guarded.

    That is a DistributedDataParallel other than the model's own that holds some of its parameters, or their sharding.

    Who guards such a model guards alone what the ranks train together, and must not act: a replay would not have the reduced
    gradients, and the other ranks would not take part.

    Parameters
    ----------
    model
        What the guard was given: the wrapper itself, where it was made before.

    """
    if not (dist.is_available() and dist.is_initialized()):
        return False  # asked at every forward: nothing is walked where nobody can reduce
    if model in _whole and sharding_of(model).spread:
        return True
    own = distributed(model)
    held = {id(parameter) for parameter in model.parameters()}
    others = {*_wrappers, *wrappers_inside(model)}
    if (running := running_wrapper()) is not None:
        others.add(running)
    others.discard(own)
    return any(id(parameter) in held for wrapper in others for parameter in wrapper.parameters())


def wrappers_inside(model: nn.Module) -> list[DistributedDataParallel]:
    """Return every DistributedDataParallel among a model's modules, itself included."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def wrapped_by(module: nn.Module) -> DistributedDataParallel | None:
    """Return a known DistributedDataParallel that holds ``module`` and is not itself part of it."""
    for wrapper in list(_wrappers):
        if wrapper is not module and any(part is module for part in wrapper.modules()):
            return wrapper
    return None
