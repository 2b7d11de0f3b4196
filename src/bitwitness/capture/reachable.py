"""What can be reached from a value: containers, objects and functions within one another, each as something to iterate over."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from operator import is_not, itemgetter
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import torch
from torch import nn

from bitwitness.capture.bare import CONTAINERS, Items, Keys, is_a, size_of, values_of
from bitwitness.capture.containers import has_attributes
from bitwitness.capture.contents import Place
from bitwitness.capture.structure import PLAIN
from bitwitness.tap.modes import is_ours

_LONG = 1000  # entries of a container, beyond which only their number is looked at
_DEPTH = 5  # containers within containers, objects within objects
FRAMEWORKS = frozenset(
    (
        "torch",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "pytorch_lightning",
        "accelerate",
        "numpy",
        "logging",
        "concurrent",
        "asyncio",
        "multiprocessing",
        "weakref",
        "bitwitness",
    )
)
"""Packages whose objects change for reasons of their own, or hold the whole training."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TORCHS = frozenset(vars(nn.Module()))
"""What torch itself keeps in a module."""


class Some:
    """Some of the names of a mapping; iterates over their values."""

    __slots__ = ("_get", "keys", "names")

    def __init__(self, names: Mapping[str, Any], keys: Iterable[str]) -> None:
        self.names = names
        self.keys = tuple(keys)
        # Two more than there are, so that it returns a tuple for one key, too; an itemgetter is ten times as quick as a loop.
        self._get = itemgetter(*self.keys, *self.keys[:1], *self.keys[:1]) if self.keys else None

    def __iter__(self) -> Iterator[Any]:
        try:
            return islice(() if self._get is None else self._get(self.names), len(self.keys))
        except KeyError:  # one has gone
            return map(self.names.get, self.keys)


class Without:
    """How many names a mapping has, and the values of all but a few."""

    __slots__ = ("_some", "names")

    def __init__(self, names: Mapping[str, Any], left_out: frozenset[str]) -> None:
        self.names = names
        self._some = Some(names, [key for key in names if key not in left_out])

    def __iter__(self) -> Iterator[Any]:
        return chain((len(self.names),), self._some)


class Theirs:
    """A mapping's values that are not this package's own code."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[Any, Any]) -> None:
        self._names = names

    def __iter__(self) -> Iterator[Any]:
        return (value for value in tuple(self._names.values()) if not is_ours(value))  # other threads add hooks, too


class Present:
    """Which of a mapping's names stand for something: FSDP2 exchanges what they stand for, shards and whole parameters."""

    __slots__ = ("names",)

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names

    def __iter__(self) -> Iterator[bool]:
        return map(is_not, tuple(self.names.values()), repeat(None))


class Cell:
    """A closure's cell."""

    __slots__ = ("cell",)

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    def __iter__(self) -> Iterator[Any]:
        try:
            yield self.cell.cell_contents
        except ValueError:
            return  # not filled yet


class Function:
    """A function's code, default arguments and attributes."""

    __slots__ = ("function",)

    def __init__(self, function: FunctionType) -> None:
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        f = self.function
        yield from (f.__code__, f.__defaults__, f.__kwdefaults__)
        yield from tuple(f.__dict__.values())


class Size:
    """How many things a long container holds."""

    __slots__ = ("container",)

    def __init__(self, container: Any) -> None:
        self.container = container

    def __iter__(self) -> Iterator[Any]:
        yield size_of(self.container)


class Variable:
    """A context variable's value here."""

    __slots__ = ("variable",)

    def __init__(self, variable: ContextVar[Any]) -> None:
        self.variable = variable

    def __iter__(self) -> Iterator[Any]:
        yield self.variable.get(None)


@dataclass(frozen=True, slots=True)
class Holder:
    """Something that holds values (``thing``): where it was found, and what iterates over the values.

    ``keys`` name these, if they have names.
    """

    place: Place
    name: str
    values: Any
    keys: Any = None
    thing: Any = None

    def names(self) -> list[str]:
        """Return the values' names; none if they have none."""
        return [] if self.keys is None else [str(key) for key in self.keys]


class Search:
    """Finds what values hold.

    Parameters
    ----------
    known
        The ``id`` of modules and parameters that are looked at by themselves.
    seen
        What was found before, by ``id``: each thing is taken once.
    room
        How much may be found.

    """

    def __init__(self, known: set[int], seen: dict[int, Any], room: int) -> None:
        self.taken: list[int] = []
        """The ``id`` of what this search found."""
        self.sources: list[Holder] = []
        self.tensors: list[tuple[Place, str, torch.Tensor]] = []
        self.left_out: str | None = None
        """The first for which there was no room."""
        self._known = known
        self._seen = seen
        self._room = room

    def enter(self, place: Place, name: str, value: Any, depth: int) -> None:
        """Take a value, and what it holds."""
        if isinstance(value, PLAIN) or id(value) in self._seen or depth > _DEPTH:
            return
        if len(self.sources) >= self._room:
            self.left_out = self.left_out or name
            return
        self._seen[id(value)] = value
        self.taken.append(id(value))
        if isinstance(value, torch.Tensor):
            self._tensor(place, name, value)
        elif isinstance(value, nn.Module):
            self._module(place, name, value, depth)
        elif is_a(value, *CONTAINERS) and size_of(value) > _LONG:
            self._hold(place, name, Size(value), [], depth, thing=value)
        elif is_a(value, dict):
            bare, keys = (value.values(), value.keys()) if type(value) is dict else (Items(value), Keys(value))
            self._hold(place, name, bare, values_of(value), depth, keys=keys, thing=value)
            self._attributes(place, name, value, depth)
        elif is_a(value, list, deque, set):
            bare = value if type(value) in CONTAINERS else Items(value)
            self._hold(place, name, bare, values_of(value), depth, thing=value)
            self._attributes(place, name, value, depth)
        elif is_a(value, tuple, frozenset):
            for item in values_of(value):
                self.enter(place, name, item, depth + 1)
        else:
            self._object(place, name, value, depth)

    def _hold(
        self, place: Place, name: str, values: Any, items: list[Any], depth: int, *, keys: Any = None, thing: Any
    ) -> None:
        self.sources.append(Holder(place, name, values, keys, thing))
        for item in items:
            self.enter(place, name, item, depth + 1)

    def _attributes(self, place: Place, name: str, value: Any, depth: int) -> None:
        """Take what is set on a container of a class of the script's."""
        if has_attributes(value) and (names := getattr(value, "__dict__", None)) is not None:
            self._hold(place, name, names.values(), list(names.values()), depth, keys=names.keys(), thing=value)

    def _object(self, place: Place, name: str, value: Any, depth: int) -> None:
        view: Any = None
        if isinstance(value, FunctionType):
            view = Function(value) if value.__defaults__ or value.__kwdefaults__ or value.__dict__ else None
        elif isinstance(value, ContextVar):
            view = Variable(value)
        elif isinstance(value, partial):
            self._hold(place, name, value.keywords.values(), [value.func, *value.args], depth, thing=value)
        elif isinstance(value, MethodType | BuiltinFunctionType | MethodWrapperType):
            self.enter(place, name, value.__self__, depth + 1)
        elif not isinstance(value, ModuleType) and _looked_into(value):
            names = vars(value)
            self._hold(place, name, names.values(), list(names.values()), depth, keys=names.keys(), thing=value)
        if view is not None:
            self._hold(place, name, view, list(view), depth, thing=value)

    def _module(self, place: Place, name: str, value: nn.Module, depth: int) -> None:
        """Take a module that is not one of the root's own: kept in a list, named by the code."""
        if id(value) in self._known or type(value).__module__.startswith(("torch.nn.parallel", "torch.distributed")):
            return
        held = {key: item for key, item in vars(value).items() if key not in TORCHS}
        self._hold(place, name, Some(vars(value), held), list(held.values()), depth, thing=value)
        for tensor in (*value.buffers(recurse=False), *value.parameters(recurse=False)):
            self._tensor(place, name, tensor)
        for child in value.children():
            self.enter(place, name, child, depth)

    def _tensor(self, place: Place, name: str, value: torch.Tensor) -> None:
        if (
            value.layout is torch.strided
            and not value.is_meta
            and type(value) in (torch.Tensor, nn.Parameter)
            and id(value) not in self._known
            and not value.is_quantized
        ):
            self.tensors.append((place, name, value))
        if vars(value):
            self.sources.append(Holder(place, name, vars(value).values(), vars(value).keys(), value))


def _looked_into(value: Any) -> bool:
    package, _, module = type(value).__module__.partition(".")
    if package in FRAMEWORKS or (package == "transformers" and "configuration" not in module):
        return isinstance(value, threading.local)
    return hasattr(value, "__dict__") and not hasattr(type(value), "__next__")
