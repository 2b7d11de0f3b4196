"""Which modules' results are looked at on every step: few, spread over the whole model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from bitwitness.capture.norms import is_norm
from bitwitness.tap.compiled import is_compiled

_MODULES = 8  # each look costs some 0.1 ms, and more of them were seen to find hardly more
# Elements that are read of one result: of a stream, which all later layers add to, more than of the rest. A tile of a
# matrix unit has 16 rows: of up to 16 times as many elements, one of its rows is among those read.
_STREAM = 1 << 15
_OTHER = 1 << 13


@dataclass(frozen=True, slots=True)
class LookedAt:
    """A module that is looked at: its path, itself, and how many elements of a result are read at most."""

    path: str
    module: nn.Module
    most: int


def modules_to_look_at(root: nn.Module) -> list[LookedAt]:
    """Return the modules to look at, at most 8, in the model's order.

    Members of a `torch.nn.ModuleList` (a model's blocks) come first: what they return is the stream that all later layers read.
    Then norms and whatever else has parameters of its own. Where there are too many of a kind, it is thinned evenly.
    Scripted and compiled modules are left out, and what lies inside them.
    """
    stream, other, visible = [], [], _visible(root)
    for path, module in visible:
        if _is_block(root, path, module):
            stream.append(LookedAt(path, module, _STREAM))
        elif is_norm(module):
            other.append(LookedAt(path, module, _STREAM))
        elif any(p is not None for p in module._parameters.values()):
            other.append(LookedAt(path, module, _OTHER))
    first = _thinned(stream, _MODULES - min(len(other), _MODULES // 2))
    chosen = {one.path: one for one in (*first, *_thinned(other, _MODULES - len(first)))}
    return [chosen[path] for path, _ in visible if path in chosen]


def _visible(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a model's parts with their paths, each once, without what compilers have taken over."""
    found: dict[int, tuple[str, nn.Module]] = {}
    _collect(root, "", found)
    return list(found.values())


def _collect(module: nn.Module, path: str, found: dict[int, tuple[str, nn.Module]]) -> None:
    for name, child in module.named_children():
        if isinstance(child, torch.jit.ScriptModule) or is_compiled(child) or id(child) in found:
            continue
        inner = f"{path}.{name}" if path else name
        found[id(child)] = (inner, child)
        _collect(child, inner, found)


def _is_block(root: nn.Module, path: str, module: nn.Module) -> bool:
    parent, _, _ = path.rpartition(".")
    holder = root.get_submodule(parent)
    return isinstance(holder, nn.ModuleList) and bool(module._modules)


def _thinned(members: list[LookedAt], most: int) -> list[LookedAt]:
    """Return at most so many, spread evenly, the last among them."""
    count = len(members)
    if count <= most:
        return members
    return [members[count - 1 - (count - 1) * i // max(most - 1, 1)] for i in range(most)]
