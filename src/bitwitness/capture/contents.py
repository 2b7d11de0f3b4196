"""Python values whose content may change: read, compared and put back, exactly or not at all.

A `Snapshot` holds containers with what was in them (by reference) and *leaves*, things that change within themselves:
tensors, arrays, generators. What is plain (numbers, text) needs no more than its container's reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from bitwitness.capture.bare import is_a
from bitwitness.capture.containers import Attributes, has_attributes, inside, owner_of, read, write
from bitwitness.capture.equality import equal_values, same, same_content, same_items
from bitwitness.capture.leaves import LARGEST, UNTOLD, Position, content_of, kind_of, put_back, restorable
from bitwitness.capture.lossgraph import version_of
from bitwitness.capture.structure import PLAIN
from bitwitness.stats.local import is_torchs_own
from bitwitness.tap.compat import keeping_versions

Place = tuple[Any, ...]
"""Where something was found: a module's position or a piece of code, and a name there."""

_DEPTH = 6
"""How far to go into containers within containers: a script's own state is seldom deeper, and a graph of objects has no end."""
_MOST = 20_000
"""Containers and leaves in one snapshot, since one is taken at every forward. More of them end replays; the first is named."""
ARGUMENT = "argument"
"""The first part of the place of what a forward was given, which may be an object of any library."""
SCRIPTED = "scripted attributes"
"""The last part of the place of what a scripted module's own code changes."""
_CONTAINERS = (dict, list, set, deque, tuple, frozenset)
_MISSING = object()


@dataclass(slots=True)
class Container:
    """Something that holds other things, and what it held. ``keys``: only these count, in a dictionary or of an object."""

    place: Place
    name: str
    thing: Any
    held: Any
    keys: frozenset[str] | None = None

    def changed(self) -> list[str]:
        """Return the names of what is no longer as it was: the container itself, or keys of a namespace."""
        now = read(self.thing, self.keys)
        if isinstance(now, dict) and self.is_namespace:
            return [
                key for key in {**self.held, **now} if not same(self.held.get(key, _MISSING), now.get(key, _MISSING))
            ]
        return [] if same_items(self.held, now) else [""]

    @property
    def exact(self) -> bool:
        """Whether it can be put back as it was: which element a set gives next depends on all that it has given before."""
        return not is_a(self.thing, set) or self.held <= read(self.thing)

    @property
    def is_namespace(self) -> bool:
        """Whether its keys are names of places of their own."""
        return len(self.place) == 1


@dataclass(slots=True)
class Leaf:
    """A thing that changes within itself. ``content`` is None where it is not kept."""

    place: Place
    name: str
    thing: Any
    content: Any
    version: int = 0

    @property
    def exact(self) -> bool:
        """Whether it can be put back as it was."""
        return (
            self.content is not None and not isinstance(self.content, Position) and restorable(self.thing, self.content)
        )

    @property
    def untold(self) -> bool:
        """Whether it does not show what it holds."""
        return kind_of(self.thing) == UNTOLD

    def changed(self) -> bool:
        """Tell whether its content is no longer what it was, as far as that is known."""
        thing = self.thing
        if isinstance(thing, torch.Tensor):
            if self.content is None:
                return version_of(thing) != self.version
            return thing.shape != self.content.shape or not equal_values(thing.detach(), self.content)
        return not same_content(self.content, content_of(thing))

    def restore(self) -> bool:
        """Put its content back; return whether that was possible."""
        if not self.exact:
            return False
        if isinstance(self.thing, torch.Tensor):
            return _restore_tensor(self.thing, self.content)
        put_back(self.thing, self.content)
        return True


@dataclass(slots=True)
class Snapshot:
    """Containers and leaves as they were at one moment; ``left_out`` names the first for which there was no room."""

    containers: list[Container] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    nbytes: int = 0
    left_out: str | None = None

    def things(self) -> set[int]:
        """Return the ``id`` of all that is known."""
        return {id(owner_of(one.thing)) for one in self.containers} | {id(leaf.thing) for leaf in self.leaves}

    def changed(self) -> dict[Place, str]:
        """Return the places at which something differs now, with printable names."""
        found: dict[Place, str] = {}
        for one in self.containers:
            for key in one.changed():
                place = (*one.place, key) if one.is_namespace else one.place
                found.setdefault(place, f"{one.name}.{key}" if one.is_namespace else one.name)
        for leaf in self.leaves:
            if leaf.place not in found and leaf.changed():
                found[leaf.place] = leaf.name
        return found

    def used_up(self) -> str | None:
        """Return the name of an argument of the forward that shows at most how far it has come: an iterator, say."""
        for leaf in self.leaves:
            if leaf.place[0] == ARGUMENT and (leaf.untold or isinstance(leaf.content, Position)):
                return f"{leaf.name} ({type(leaf.thing).__name__})"
        return None

    def restore(self) -> list[str]:
        """Put all back; return the names of what could not be."""
        lost = [one.name for one in self.containers if not one.exact]
        for one in self.containers:
            if one.changed():
                write(one.thing, one.held, one.keys)
        return lost + [leaf.name for leaf in self.leaves if leaf.changed() and not leaf.restore()]


class SnapshotWalk:
    """Takes a snapshot.

    Parameters
    ----------
    keep
        Keep tensors' contents, up to `LARGEST` bytes in all; ``keep(place)`` says so for what is found at a place.
    known
        Returns the ``id`` of modules and parameters that somebody else minds: the root's own. Asked only where any is met.

    """

    def __init__(
        self, keep: Callable[[Place], bool] = lambda _: True, known: Callable[[], frozenset[int]] = frozenset
    ) -> None:
        self.snapshot = Snapshot()
        self._keep = keep
        self._ask_known = known
        self._seen: set[int] = set()

    @cached_property
    def _known(self) -> frozenset[int]:
        return self._ask_known()

    def namespace(self, place: Place, name: str, thing: Any, keys: frozenset[str] | None = None) -> None:
        """Take what a namespace holds (an object's attributes, some of a script's globals), each key a place."""
        held = read(thing, keys)
        self.snapshot.containers.append(Container(place, name, thing, held, keys))
        for key, value in held.items():
            self.enter((*place, key), f"{name}.{key}", value)
        if isinstance(thing, nn.Module):
            self._tensors_attributes(place, name, thing, keys)

    def _tensors_attributes(self, place: Place, name: str, module: nn.Module, keys: frozenset[str] | None) -> None:
        """Take what a script has set on a module's parameters and buffers, and what scripted code keeps beside them."""
        own = {**module._parameters, **module._buffers}
        for key, tensor in own.items():
            if tensor is not None and (keys is None or key in keys):
                self._attributes((*place, key), f"{name}.{key}", tensor, 0, grad=key in module._buffers)
        if isinstance(module, torch.jit.ScriptModule) and (keys is None or SCRIPTED in keys):
            self.snapshot.leaves.append(Leaf((*place, SCRIPTED), f"{name}'s attributes", module, content_of(module)))

    def enter(self, place: Place, name: str, value: Any, depth: int = 0) -> None:
        """Take a value and all that it holds."""
        if (isinstance(value, PLAIN) and not _is_more(value)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if len(self._seen) > _MOST:
            self.snapshot.left_out = self.snapshot.left_out or name
            return
        if depth > _DEPTH:
            return
        if isinstance(value, torch.Tensor):
            self._tensor(place, name, value, depth)
        elif isinstance(value, nn.Module):
            self._modules(place, name, value, depth)
        elif (isinstance(value, PLAIN) or self._content(place, name, value, depth)) and has_attributes(value):
            self._attributes(place, name, value, depth)

    def _content(self, place: Place, name: str, value: Any, depth: int) -> bool:
        """Take what a thing holds; return whether that leaves its attributes out."""
        if kind_of(value) is not None:
            self.snapshot.leaves.append(Leaf(place, name, value, content_of(value)))
            return True
        if (held := inside(value, foreign=place[0] == ARGUMENT)) is None:
            return False
        if not isinstance(held, tuple) and not is_a(value, tuple, frozenset):
            self.snapshot.containers.append(Container(place, name, value, held))
        for item in (*held, *held.values()) if isinstance(held, dict) else held:
            self.enter(place, name, item, depth + 1)
        return is_a(value, *_CONTAINERS)

    def _attributes(self, place: Place, name: str, value: Any, depth: int, *, grad: bool = True) -> None:
        """Take what is set on something that is, or holds, other things besides."""
        beside = Attributes(value, grad=grad)
        held = read(beside)
        self.snapshot.containers.append(Container(place, name, beside, held))
        for item in held.values():
            self.enter(place, name, item, depth + 1)

    def _modules(self, place: Place, name: str, root: nn.Module, depth: int) -> None:
        """Take a module that is not the root's, and those in it: one kept in a list, or named by the code."""
        found = [(path, one) for path, one in root.named_modules() if id(one) not in self._known and not _wraps(one)]
        self._seen.update(id(one) for _, one in found)
        for path, module in found:
            inner = f"{name}.{path}" if path else name
            held = read(module)
            self.snapshot.containers.append(Container((*place, path), inner, module, held))
            mode = frozenset(("training",))
            self.snapshot.containers.append(
                Container((*place, path), inner, vars(module), {"training": module.training}, mode)
            )
            for key, value in (*held.items(), *_own(module)):
                self.enter((*place, path, key), f"{inner}.{key}", value, depth)
            self._tensors_attributes((*place, path), inner, module, None)

    def _tensor(self, place: Place, name: str, value: torch.Tensor, depth: int) -> None:
        if isinstance(value, nn.Parameter) and (not is_torchs_own(value) or id(value) in self._known):
            return  # the training's own; replays do not change parameters
        size = value.numel() * value.element_size() if value.layout is torch.strided and not value.is_meta else LARGEST
        content = None
        if self._keep(place) and self.snapshot.nbytes + size <= LARGEST:
            self.snapshot.nbytes += size
            content = value.detach().clone()
        self.snapshot.leaves.append(Leaf(place, name, value, content, version_of(value)))
        self._attributes(place, name, value, depth)


def _is_more(value: Any) -> bool:
    """Tell whether what is plain is of a class of the script's: it may have attributes."""
    return type(value).__module__ != "builtins" and not isinstance(value, type) and has_attributes(value)


def _wraps(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.nn.parallel", "torch.distributed"))


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    """Return a module's tables of parameters and buffers, where there are any."""
    tables = ("_parameters", vars(module).get("_parameters")), ("_buffers", vars(module).get("_buffers"))
    return [(key, table) for key, table in tables if isinstance(table, dict) and table]


def _restore_tensor(thing: torch.Tensor, content: torch.Tensor) -> bool:
    if thing.shape != content.shape or thing.is_inference():
        return False
    with torch.no_grad(), keeping_versions((thing,)):
        thing.detach().copy_(content)
    return True
