"""Which names the script's own functions use: globals, closures, class attributes that a module's forward may change."""

from __future__ import annotations

import builtins
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwitness.capture.bare import is_a, values_of
from bitwitness.capture.reachable import HOOKS
from bitwitness.capture.whosecode import imports_of, is_users, is_users_kind, looks_up, names_in, users_modules
from bitwitness.tap.compat import OPDEFS, CustomOpDef

Namespace = tuple[str, Any, frozenset[str] | None]
"""A printable name, what holds the names, and which of them."""

_SKIPPED = (ModuleType, type, FunctionType, MethodType)
_FORWARD = frozenset(("forward", "__call__"))
_NESTED, _TABLE = 3, 256  # tables within tables, and entries of each, that are looked through for functions
_CACHED = type(lru_cache(lambda: None))
_BUILT_IN = (BuiltinFunctionType, MethodWrapperType)
"""Bound methods of objects that are not written in Python: a generator's ``random``, a list's ``pop``."""


def is_users_function(value: Any) -> bool:
    """Tell whether a value is a function of the script's."""
    function = _function(value)
    return function is not None and is_users(function.__code__)


def namespaces_of(root: nn.Module, beside: Iterable[Any] = ()) -> Iterator[Namespace]:
    """Yield the namespaces outside the modules themselves that their code uses, each once.

    ``beside``: functions, classes and objects that ran with it.
    """
    search = _CodeSearch()
    for module in root.modules():
        search.kind(type(module))
        for name in HOOKS:
            for hook in getattr(module, name, {}).values():
                search.function(hook)
        for value in vars(module).values():
            search.used(value)
        for parameter in module.parameters(recurse=False):
            for hook in (parameter._backward_hooks or {}).values():
                search.function(hook)
    for value in _in_torchs_places():
        search.used(value)
    for thing in beside:  # last, so that the others' places stay what they are
        search.beside(thing)
    yield from search.found()


def _in_torchs_places() -> Iterator[Any]:
    """Yield functions of the script's that stand in torch's places: patched functions, global hooks, operators of its own."""
    for names in (vars(torch.nn.functional), vars(torch), vars(torch.Tensor)):
        yield from filter(is_users_function, tuple(names.values()))
    hooks = vars(sys.modules["torch.nn.modules.module"])
    for name in HOOKS:
        yield from hooks.get(f"_global{name}", {}).values()
    yield from tuple(OPDEFS.values())


class _CodeSearch:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._kept: list[object] = []
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._cells: dict[int, tuple[str, CellType]] = {}
        self._owners: dict[int, tuple[str, dict[Any, Any]]] = {}
        self._functions: dict[int, FunctionType] = {}
        self._kinds: dict[int, tuple[type, frozenset[str]]] = {}

    def _first(self, thing: object) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        self._kept.append(thing)  # so that its id stays its own
        return True

    def kind(self, kind: type) -> None:
        """Take a class's own attributes and what its methods use, and those of the classes it is made from."""
        if is_users_kind(type(kind)):
            self.kind(type(kind))  # what a metaclass does when its classes are used
        for base in kind.__mro__:
            if not self._first(base):
                continue
            functions = [f for f in map(_function, vars(base).values()) if f is not None and is_users(f.__code__)]
            keys = (
                {key for key in vars(base) if not key.startswith("__")} if functions or is_users_kind(base) else set()
            )
            keys |= _FORWARD & vars(base).keys() if issubclass(base, nn.Module) else set()
            if is_users_kind(base):  # what is set through a subclass is the subclass's from then on
                keys |= {key for above in base.__mro__[1:] if is_users_kind(above) for key in _data_names(above)}
            if keys:
                self._kinds[id(base)] = base, frozenset(keys)
            for function in functions:
                self.function(function)

    def function(self, value: Any) -> None:
        """Take what a function of the script's uses, and what it is bound to."""
        self._bound(value)
        function = _function(value)
        if function is None or not self._first(function):
            return
        if not is_users(function.__code__):  # a library's, around functions of the script's: decorators
            for cell in function.__closure__ or ():
                self._functions_in(_content(cell))
            self._functions_in(vars(function).get("__wrapped__"))
        else:
            self._uses(function)

    def _uses(self, function: FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            self._cells[id(cell)] = f"{function.__qualname__}'s {name}", cell
            try:
                self.used(cell.cell_contents)
            except ValueError:
                continue  # not filled yet
        self._functions[id(function)] = function
        mentions = names_in(function.__code__)
        mentioned, wanted = mentions.mentioned, mentions.wanted
        seen: set[int] = set()
        self._named(function.__globals__, wanted, mentioned, seen)
        self._named(vars(builtins), frozenset(filter(_was_added, wanted)), mentioned, seen)
        cells = map(_content, function.__closure__ or ())  # a function around this one may have imported a module
        for module in {*imports_of(function.__code__, function.__globals__), *filter(_is_module, cells)}:
            if id(vars(module)) not in seen:
                self._named(vars(module), mentioned, mentioned, seen)
        if looks_up(mentioned) and self._first(looks_up):
            for module in users_modules():
                names = vars(module)
                self._named(names, frozenset(n for n in names if not n.startswith("__")), frozenset(), set())

    def _functions_in(self, value: Any) -> None:
        if isinstance(value, Mapping | list | tuple | FunctionType | MethodType | partial):
            self.used(dict(value) if isinstance(value, Mapping) else value)

    def _named(self, names: dict[str, Any], wanted: frozenset[str], mentioned: frozenset[str], seen: set[int]) -> None:
        """Take some of a namespace's names; of modules among them, each once, what a piece of code mentions."""
        seen.add(id(names))
        _, known = self._globals.setdefault(id(names), (names, set()))
        for name in wanted & names.keys():
            item = names[name]
            if item is os:
                self._owners[id(os.environ)] = "the environment", {"environ": os.environ}
            elif isinstance(item, ModuleType) and id(vars(item)) not in seen:
                self._named(vars(item), mentioned, mentioned, seen)
            elif name not in known:
                self.used(item)
            self._marked(item, mentioned)
            known.add(name)

    def _marked(self, item: Any, mentioned: frozenset[str]) -> None:
        """Take what a script may have set on one of torch's classes of modules, by names that its code mentions."""
        if isinstance(item, type) and issubclass(item, nn.Module) and not is_users_kind(item):
            _, known = self._kinds.get(id(item), (item, frozenset()))
            self._kinds[id(item)] = item, known | {name for name in mentioned if not name.startswith("__")}

    def _bound(self, value: Any) -> None:
        """Take the object of a bound method or a callable object, and the arguments of a partial one."""
        if isinstance(value, partial):
            self._owners[id(value)] = "partial", {**dict(enumerate(value.args)), **value.keywords}
            self.function(value.func)
            return
        if isinstance(value, _BUILT_IN):
            if value.__self__ is not None and not isinstance(value.__self__, ModuleType | type):
                self._owners[id(value.__self__)] = type(value.__self__).__qualname__, {"object": value.__self__}
            return
        owner = value.__self__ if isinstance(value, MethodType) else value
        if not isinstance(value, MethodType) and not (is_users_kind(type(value)) and callable(value)):
            return
        if isinstance(owner, nn.Module | type) or not self._first(owner):
            return
        self._owners[id(owner)] = type(owner).__qualname__, {"object": owner}
        self.kind(type(owner))

    def beside(self, thing: Any) -> None:
        """Take a function, a class, or an object with what it holds and what its class's methods use."""
        self.used(thing)
        if not isinstance(thing, _SKIPPED) and is_users_kind(type(thing)) and self._first(thing):
            self._owners[id(thing)] = type(thing).__qualname__, {"object": thing}

    def used(self, item: Any, depth: int = 0) -> None:
        """Take what a name stands for, and what a table of functions holds."""
        if is_a(item, defaultdict):
            self.used(item.default_factory, depth + 1)
        if is_a(item, dict, list, tuple):
            for value in values_of(item)[:_TABLE] if depth < _NESTED else ():
                self.used(value, depth + 1)
            return
        if isinstance(item, type):
            if is_users_kind(item):
                self.kind(item)
            return
        if isinstance(item, CustomOpDef):
            self.function(item._init_fn)
        if isinstance(item, np.vectorize):
            self.function(item.pyfunc)
        self.function(item.__wrapped__ if isinstance(item, _CACHED) else item)
        if not isinstance(item, _SKIPPED) and not isinstance(item, nn.Module) and is_users_kind(type(item)):
            self.kind(type(item))

    def found(self) -> Iterator[Namespace]:
        for owner, names in self._globals.values():
            yield str(owner.get("__name__", "globals")), owner, frozenset(names)
        for name, cell in self._cells.values():
            if not isinstance(_content(cell), _SKIPPED):
                yield name, cell, None
        for name, things in self._owners.values():
            yield name, things, None
        for function in self._functions.values():
            yield f"{function.__qualname__}'s own", function, None
        for kind, keys in self._kinds.values():
            yield kind.__qualname__, kind, keys


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType)


def _data_names(kind: type) -> set[str]:
    return {key for key, value in vars(kind).items() if not key.startswith("__") and _function(value) is None}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _function(value: Any) -> FunctionType | None:
    if isinstance(value, MethodType | staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None


def _was_added(name: str) -> bool:
    """Tell whether a name among the built-in ones is none of Python's own: these are functions and classes."""
    return not isinstance(vars(builtins).get(name, len), BuiltinFunctionType | type)
