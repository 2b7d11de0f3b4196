"""What holds other things, in Python: dictionaries, lists, objects with attributes, cells, and how to read and write each."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable
from types import CellType, FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bitwitness.capture.bare import is_a, items_of, values_of
from bitwitness.tap.compat import plain_tensors

_DATA: tuple[type, ...] = (
    *(SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap, threading.local),
    *(threading.Semaphore, threading.BoundedSemaphore, threading.Event, contextlib.ExitStack),
)
"""Classes of Python's own library whose objects hold what a script puts there."""
_MAPPINGS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, os._Environ)
"""What is read and written by its own methods."""
_SHOWN: frozenset[type] = frozenset((*_DATA, *_MAPPINGS))
_POINTERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    weakref.ref: lambda pointer: (pointer(),),
    MappingProxyType: lambda proxy: tuple(proxy.values()),
}
"""What stands for other things, and holds nothing by itself."""
_OWN = frozenset(vars(nn.Module())) | {"_is_full_backward_hook", "_compiled_call_impl", "forward"}
"""A module's attributes that torch itself keeps; ``forward`` is captured by its own name."""
_TRAINERS = ("lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate")
_FOREIGN = frozenset(("torch", "numpy", "logging", "threading", "bitwitness", *_TRAINERS))
_TORCHS_DATA = ("torch.quasirandom", "torch.optim")
"""Modules of torch whose objects hold what a script may change, and nothing else."""
_OPTIMIZERS = frozenset(("param_groups", "defaults"))
"""What of an optimizer a forward may read or change; the rest grows with the model."""
_GRAD = ".grad"
_COMPILERS = "_dynamo"  # how torch's compiler marks a tensor
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__doc__")


class Attributes:
    """What something holds in attributes beside what it is: a list's subclass, an array's, a tensor.

    ``grad``: a tensor's ``.grad`` counts among them.
    """

    __slots__ = ("grad", "of")

    def __init__(self, of: Any, *, grad: bool = True) -> None:
        self.of, self.grad = of, grad


def has_attributes(value: Any) -> bool:
    """Tell whether a script can have set attributes on a container, an array or another thing with content of its own."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package in _FOREIGN or (package in sys.stdlib_module_names and package != "__main__"):
        return False
    return hasattr(value, "__dict__") or any(map(_slots, kind.__mro__))


def owner_of(thing: Any) -> Any:
    """Return what a container belongs to: itself, or that whose attributes it is."""
    return thing.of if type(thing) is Attributes else thing


def read(thing: Any, keys: frozenset[str] | None = None) -> Any:
    """Return what a container holds now, in a container of its own."""
    if is_a(thing, dict):
        if keys is None:
            return items_of(thing)
        return {key: dict.__getitem__(thing, key) for key in keys if dict.__contains__(thing, key)}
    if isinstance(thing, _MAPPINGS):
        return dict(thing)
    if is_a(thing, list, deque):
        return values_of(thing)
    if is_a(thing, set):
        return set(values_of(thing))
    return _names(thing, keys)


def _names(thing: Any, keys: frozenset[str] | None) -> dict[str, Any]:
    """Return what a thing holds by name, of its attributes those that are the script's."""
    if type(thing) is Attributes:
        return _beside(thing)
    if isinstance(thing, CellType):
        try:
            return {"value": thing.cell_contents}
        except ValueError:  # an empty cell
            return {}
    if isinstance(thing, nn.Module):
        return {key: value for key, value in vars(thing).items() if key not in _OWN and (keys is None or key in keys)}
    if isinstance(thing, FunctionType):
        return {key: getattr(thing, key) for key in _OF_FUNCTIONS} | vars(thing)
    if isinstance(thing, type):
        return {key: vars(thing)[key] for key in keys or () if key in vars(thing)}
    if isinstance(thing, Optimizer):
        return {key: value for key, value in vars(thing).items() if key in _OPTIMIZERS}
    return _attributes(thing, keys)


def write(thing: Any, held: Any, keys: frozenset[str] | None = None) -> None:
    """Put back into a container what `read` returned."""
    if type(thing) is Attributes:
        _set_beside(thing, held)
    elif isinstance(thing, CellType):
        thing.cell_contents = held["value"]
    elif isinstance(thing, (dict, *_MAPPINGS)) and keys is None:
        _set_entries(thing, held)
    elif isinstance(thing, dict | nn.Module | threading.local):
        names = thing if isinstance(thing, dict) else vars(thing)  # past the module's own __setattr__
        for key in read(thing, keys).keys() - held.keys():
            del names[key]
        names.update(held)
    elif isinstance(thing, list):
        thing[:] = held
    elif isinstance(thing, deque):
        thing.clear()
        thing.extend(held)
    elif isinstance(thing, set):  # what stays keeps its place
        thing.difference_update(set(thing) - held)
        thing.update(held - thing)
    else:
        _set_attributes(thing, held, keys)


def _beside(attributes: Attributes) -> dict[str, Any]:
    thing = attributes.of
    held = _attributes(thing, None)
    if not isinstance(thing, torch.Tensor):
        return held
    held = {key: value for key, value in held.items() if not key.startswith(_COMPILERS)}
    if not attributes.grad:
        return held
    with plain_tensors():
        return {**held, _GRAD: thing.grad} if thing.is_leaf and thing.grad is not None else held


def _set_entries(thing: Any, held: dict[Any, Any]) -> None:
    if isinstance(thing, os._Environ):  # each write goes to the process's own environment, too
        for name in thing.keys() - held.keys():
            del thing[name]
        thing.update({name: value for name, value in held.items() if thing.get(name) != value})
        return
    thing.clear()
    thing.update(held)


def _set_beside(attributes: Attributes, held: dict[str, Any]) -> None:
    thing = attributes.of
    if isinstance(thing, torch.Tensor) and attributes.grad:
        with plain_tensors():
            if thing.is_leaf and thing.grad is not held.get(_GRAD):
                thing.grad = held.get(_GRAD)
    names = {key: value for key, value in held.items() if key != _GRAD}
    for key in _beside(attributes).keys() - held.keys():
        object.__delattr__(thing, key)
    for key, value in names.items():
        object.__setattr__(thing, key, value)


def _attributes(thing: Any, keys: frozenset[str] | None) -> dict[str, Any]:
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    found = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    found |= getattr(thing, "__dict__", {})
    return found if keys is None else {key: found[key] for key in keys if key in found}


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))


def _set_attributes(thing: Any, held: dict[str, Any], keys: frozenset[str] | None) -> None:
    put = type.__setattr__ if isinstance(thing, type) else object.__setattr__
    now = read(thing, keys)
    for key in now:
        if key not in held:
            (type.__delattr__ if isinstance(thing, type) else object.__delattr__)(thing, key)
    for key, value in held.items():
        if key not in now or now[key] is not value:
            put(thing, key, value)


def inside(value: Any, *, foreign: bool) -> Any:
    """Return what a container or an object holds; None for anything else, and, unless ``foreign``, for the frameworks' own."""
    if is_a(value, dict, list, set, deque) or type(value) in _SHOWN:
        return read(value)
    if is_a(value, tuple, frozenset):
        return values_of(value)
    if type(value) in _POINTERS:
        return _POINTERS[type(value)](value)
    if isinstance(value, nn.Module | ModuleType | FunctionType) or (callable(value) and not hasattr(value, "__dict__")):
        return None
    if isinstance(value, BaseException | Optimizer) or type(value).__module__.startswith(_TORCHS_DATA):
        return read(value)
    package = type(value).__module__.partition(".")[0]
    if (not foreign and package in _FOREIGN) or (package in sys.stdlib_module_names and package != "__main__"):
        return None
    return read(value) if hasattr(value, "__dict__") or _attributes(value, None) else None
