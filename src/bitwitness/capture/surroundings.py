"""What a root's forward finds around it: whether a re-execution would find the same.

A switch that is on only while the training's forward runs, or that the forward itself consumes, makes every re-execution
differ from the training and agree with every other one: just what a transient fault looks like. So whatever the modules' code
reaches is looked at when a forward begins, and again when it is about to be repeated: the modules' attributes, what these
hold, hooks, and the names that the code uses (globals, closures, default arguments, attributes of the modules and classes
it goes through, context variables, the environment). Only references are read, with no call a name; what they refer to is
compared where it is plain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import is_, itemgetter
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from bitwitness.capture.contents import Place
from bitwitness.capture.equality import same
from bitwitness.capture.lossgraph import version_of
from bitwitness.capture.reachable import FRAMEWORKS, HOOKS, TORCHS, Cell, Holder, Present, Search, Some, Theirs, Without
from bitwitness.capture.structure import PLAIN
from bitwitness.capture.usercode import Namespace
from bitwitness.capture.whosecode import imported_since, is_ours
from bitwitness.stats.digest import bit_hashes

_MOST = 20_000  # things that are looked at
_SEARCHED_EVERY = 16  # forwards after which containers are looked for that have taken others' places
_HASHED = 1 << 20  # bytes of plain tensors whose content is looked at, too
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
_ANY_HOOKS = frozenset((*HOOKS, *_GLOBAL_HOOKS))
_TORCH = (torch.nn.functional, torch)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_PATCHED = frozenset(("backward", "register_hook"))
"""Methods that are replaced by our own for a while."""
_STRUCTURE = _ANY_HOOKS | {"_modules"}
_CAPTURED = frozenset(("forward",))
"""Of the root: frameworks send its call elsewhere for a while, and a capture knows of it."""


@dataclass(slots=True)
class _PlaceGroup:
    """What was found from one module, or one namespace of its code: its own names first."""

    top: list[Holder]
    seen: list[tuple[Any, ...]]
    sources: list[Holder] = field(default_factory=list)
    tensors: list[tuple[Place, str, torch.Tensor]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    """The ``id`` of what was found."""

    def changed(self) -> bool:
        """Tell whether other things are there now than when it was searched."""
        now = [tuple(source.values) for source in self.top]
        return not all(len(a) == len(b) and all(map(_is, a, b)) for a, b in zip(self.seen, now, strict=True))


def _is(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN))


@dataclass(frozen=True, slots=True)
class Reading:
    """What there was at one moment."""

    sources: tuple[Holder, ...]
    values: tuple[tuple[Any, ...], ...]
    tensors: tuple[tuple[Place, str, torch.Tensor], ...]
    hashes: torch.Tensor | None
    versions: tuple[int, ...]
    structure: list[tuple[Any, ...]]
    """The modules' classes, their children, and the hooks on them, on their parameters and of torch."""
    code: bool
    """Whether functions have come, or others, or modules of the script's, that were not there when it was searched."""
    imported: int
    """How many modules were."""

    def changed(self) -> dict[Place, str]:
        """Return the places at which something is not now what it was, with printable names; waits for a device if asked."""
        found: dict[Place, str] = {}
        for place, name, _ in self._differences():
            found.setdefault(place, name)
        return found

    def changed_beside(self, known: set[int]) -> list[str]:
        """Return the names of what is not now what it was and is none of the ``known`` things (by their ``id``)."""
        return [name for _, name, thing in self._differences() if id(thing) not in known]

    def _differences(self) -> Iterator[tuple[Place, str, Any]]:
        for source, old in zip(self.sources, self.values, strict=True):
            new = _values(source)
            if len(old) == len(new) and all(map(_same, old, new)):
                continue
            key = _first_difference(source.names(), old, new) if len(old) == len(new) else None
            place = (*source.place, key) if len(source.place) == 1 else source.place
            yield place, f"{source.name}.{key}" if key is not None else source.name, source.thing
        for module in imported_since(self.imported):
            yield (module.__name__, "import"), f"the import of {module.__name__}", module
        if self.hashes is not None:
            moved = (self.hashes != _hashes(self.tensors)).tolist()
        else:
            moved = [a != b for a, b in zip(self.versions, _versions(self.tensors), strict=True)]
        for (place, name, tensor), there in zip(self.tensors, moved, strict=False):
            if there:
                yield place, name, tensor


def _names_code(source: Holder) -> bool:
    """Tell whether a source is the names of a module of the root's, or of the code, and no container's or torch's."""
    return len(source.place) == 1 and source.thing not in _TORCH


def _runs(value: Any) -> bool:
    """Tell whether a value is code that a forward may run, or an object of it."""
    return callable(value) and not isinstance(value, type | nn.Module | torch.Tensor)


def _no_slots(_values: tuple[Any, ...]) -> tuple[Any, ...]:
    return ()


def _first_difference(names: list[str], old: tuple[Any, ...], new: tuple[Any, ...]) -> str | None:
    return next((n for n, a, b in zip(names, old, new, strict=False) if not _same(a, b)), None)


def _same(a: Any, b: Any) -> bool:
    if same(a, b) or is_ours(a) or is_ours(b):  # a guard that begins in another thread puts its own in torch's place
        return True
    if isinstance(a, MethodType) and isinstance(b, MethodType):  # made anew whenever it is asked for
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    return isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))


def _values(source: Holder) -> tuple[Any, ...]:
    try:
        return tuple(source.values)
    except RuntimeError:  # another thread changes it meanwhile
        return ()


class Surroundings:
    """Looks at one root.

    Parameters
    ----------
    modules
        The root's modules, with printable names, in order: their positions are the places' first parts.
    namespaces
        What their code uses (`capture.usercode`), by the places' first parts.

    """

    def __init__(self, modules: list[tuple[str, nn.Module]], namespaces: Mapping[Any, Namespace]) -> None:
        self._modules = [module for _, module in modules]
        self._known = set(map(id, self._modules))
        own = (vars(module).get("_parameters", {}).values() for module in self._modules)  # a traced module has none
        self._parameters = [parameter for held in own for parameter in held if parameter is not None]
        self._known.update(map(id, self._parameters))
        self._count = self._readings = 0
        self._imported = len(sys.modules)
        self._seen: dict[int, Any] = {}
        self.left_out: str | None = None
        """The name of something for which there was no room."""
        groups = [_of_module(position, name, module) for position, (name, module) in enumerate(modules)]
        groups += [_of_code(key, *namespace) for key, namespace in namespaces.items()]
        self._groups = [*groups, _of_torch()]
        for group in self._groups:
            self._search(group)
        self._flatten()

    def read(self) -> Reading:
        """Return what there is now."""
        self._readings += 1
        code = False
        if self._readings % _SEARCHED_EVERY == 0 or self._readings < _SEARCHED_EVERY:
            code = self._other_code(tuple(map(tuple, self._views)))  # the search takes what it finds for known
            self._search_again()
        hashes = _hashes(self._tensors) if self._hashed else None
        versions = () if hashes is not None else _versions(self._tensors)
        values = tuple(map(tuple, self._views))
        hooks = [tuple(held.items()) for parameter in self._parameters if (held := parameter._backward_hooks)]
        structure = [tuple(map(type, self._modules)), *filter(None, compress(values, self._structural)), *hooks]
        code = code or self._other_code(values) or bool(imported_since(self._imported))
        return Reading(self._sources, values, self._tensors, hashes, versions, structure, code, len(sys.modules))

    def _other_code(self, values: tuple[tuple[Any, ...], ...]) -> bool:
        """Tell whether a name that held nothing, or a function, holds another function now, or a new name does."""
        own = [values[index] for index in self._own]
        if list(map(len, own)) != self._lengths:
            return any(len(a) != len(b) and any(map(_runs, a)) for a, b in zip(own, self._held, strict=True))
        now = self._slots(tuple(chain.from_iterable(own)))
        if all(map(is_, now, self._functions)):
            return False
        return any(new is not old and _runs(new) for new, old in zip(now, self._functions, strict=True))

    def _search_again(self) -> None:
        if changed := [group for group in self._groups if group.changed()]:
            for group in changed:
                self._search(group)
            self._flatten()

    def _flatten(self) -> None:
        self._sources = tuple(source for group in self._groups for source in (*group.top, *group.sources))
        self._views = [source.values for source in self._sources]
        self._own = [index for index, source in enumerate(self._sources) if _names_code(source)]
        self._held = [tuple(self._views[index]) for index in self._own]
        self._lengths = list(map(len, self._held))
        flat = tuple(chain.from_iterable(self._held))
        slots = [index for index, value in enumerate(flat) if value is None or _runs(value)]
        self._slots = itemgetter(*slots, *slots[:1], *slots[:1]) if slots else _no_slots
        self._functions = self._slots(flat)
        self._structural = [source.place[-1] in _STRUCTURE for source in self._sources]
        self._tensors = tuple({id(entry[2]): entry for group in self._groups for entry in group.tensors}.values())
        tensors = [tensor for _, _, tensor in self._tensors]
        small = sum(tensor.nbytes for tensor in tensors) <= _HASHED
        self._hashed = small and len({tensor.device for tensor in tensors}) == 1

    def _search(self, group: _PlaceGroup) -> None:
        """Find what the group's own names hold, and what that holds."""
        self._count -= len(group.sources)
        group.seen = [tuple(source.values) for source in group.top]
        for taken in group.taken:
            self._seen.pop(taken, None)
        search = Search(self._known, self._seen, _MOST - self._count)
        for source, values in zip(group.top, group.seen, strict=True):
            if source.place[-1] in _ANY_HOOKS or isinstance(source.values, Present | Without) or source.thing in _TORCH:
                continue  # what hooks hold is found as what their code uses
            keys = source.names() or [""] * len(values)
            for key, value in zip(keys, values, strict=False):
                if key not in TORCHS:
                    name = f"{source.name}.{key}" if key else source.name
                    search.enter((*source.place, key)[:2], name, value, 0)
        group.sources, group.tensors, group.taken = search.sources, search.tensors, search.taken
        self.left_out = self.left_out or search.left_out
        self._count += len(group.sources)


def _of_module(position: int, name: str, module: nn.Module) -> _PlaceGroup:
    names = vars(module)
    label = name or type(module).__name__
    held = _foreign_names(type(module)) | (_CAPTURED if position == 0 else frozenset())
    own: Any = Some(names, [key for key in names if key not in held]) if held else names.values()
    top = [Holder((position,), label, own, own.keys if held else names.keys(), module)]
    # without our own, which come and go with the steps that are recorded: each change would mean a search of all code
    top += [Holder((position, key), f"{label}'s hooks", Theirs(names[key])) for key in HOOKS if key in names]
    children = names.get("_modules", {})
    top.append(Holder((position, "_modules"), label, children.values(), children.keys(), module))
    parameters = names.get("_parameters", {})
    if parameters:
        top.append(Holder((position, "_parameters"), label, Present(parameters), parameters.keys(), module))
    for parameter in parameters.values():
        if parameter is not None:
            top.append(
                Holder((position, "_parameters"), label, vars(parameter).values(), vars(parameter).keys(), parameter)
            )
    return _PlaceGroup(top, [])


def _foreign_names(kind: type) -> frozenset[str]:
    """Return what a framework's own class keeps in its instances; Lightning notes there what it is doing just now."""
    for base in kind.__mro__:
        if base.__name__ == "LightningModule" and base.__module__.partition(".")[0] in FRAMEWORKS:
            return frozenset(vars(base())) - frozenset(vars(nn.Module()))
    return frozenset()


def _of_code(key: Any, name: str, thing: Any, keys: frozenset[str] | None) -> _PlaceGroup:
    if isinstance(thing, CellType):
        return _PlaceGroup([Holder((key, "value"), name, Cell(thing), None, thing)], [])
    names = vars(thing) if isinstance(thing, type | ModuleType) else thing
    if not isinstance(names, Mapping):
        names, keys = {"object": names}, None
    chosen = tuple(sorted(keys)) if keys is not None else tuple(names)
    return _PlaceGroup([Holder((key,), name, Some(names, chosen), chosen, thing)], [])


def _of_torch() -> _PlaceGroup:
    hooks = vars(sys.modules["torch.nn.modules.module"])
    top = [Holder(("torch", key), "torch's global hooks", Theirs(hooks[key])) for key in _GLOBAL_HOOKS if key in hooks]
    methods = vars(torch.Tensor)
    top.append(Holder(("Tensor",), "torch.Tensor's methods", Without(methods, _PATCHED)))
    for module in _TORCH:
        functions = [key for key, value in vars(module).items() if isinstance(value, _FUNCTIONS)]
        top.append(Holder((module.__name__,), module.__name__, Some(vars(module), functions), functions, module))
    return _PlaceGroup(top, [])


def _hashes(tensors: tuple[tuple[Place, str, torch.Tensor], ...]) -> torch.Tensor:
    return bit_hashes([tensor for _, _, tensor in tensors])


def _versions(tensors: tuple[tuple[Place, str, torch.Tensor], ...]) -> tuple[int, ...]:
    return tuple(version_of(tensor) for _, _, tensor in tensors)
