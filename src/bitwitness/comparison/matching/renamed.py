"""Modules that have another name in the other run: a mapping from a file, or proposed from the two structures."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.relation import numbers_of
from bitwitness.errors import UnreadError
from bitwitness.files.reading import read_json
from bitwitness.files.shown import shown
from bitwitness.oracle.names import canonical
from bitwitness.store.source import Source

_ENOUGH = 0.5
"""Share of A's modules that B must have for their names to be taken as they are."""
_ENOUGH_WEIGHTS = 0.25
"""Share of each run's modules with weights whose values the other must have for these to tell: a port may fuse most of them."""
_TELLING = 3
"""Different weights that both runs must have: ones and zeros alone say nothing."""


def read_map(path: Path) -> dict[str, str]:
    """Read a JSON object of module paths; raise `UnreadError` if the file is none."""
    found = read_json(path, "a JSON object of module paths, A's to B's", 64 << 20)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise UnreadError(f'{shown(path)}: expected an object of texts, such as {{"model.layers.0": "blocks.0"}}')
    return found


class Mapping(dict[str, str]):
    """A mapping whose keys may be globs: ``model.layers.*`` to ``blocks.*``; the most specific fits first."""

    @cached_property
    def _globs(self) -> list[str]:
        return sorted((key for key in self if "*" in key), key=len, reverse=True)

    def get(self, key: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """Return B's path for one of A's."""
        if key in self:
            return self[key]
        for pattern in self._globs:
            if fnmatchcase(key, pattern):
                before, _, after = pattern.partition("*")
                part = key[len(before) : len(key) - len(after)]
                return self[pattern].replace("*", part, 1)
        return default


def proposed(a: Source, b: Source) -> dict[str, str]:
    """Return which modules of A are which of B's by another name; empty where most names agree, or nothing fits.

    Modules are matched in the order in which they ran: by the values of their parameters where enough of these are in both
    runs (a port that loaded the weights), else by what they compute, their operators and their results' shapes.
    """
    ranks = [rank for rank in a.ranks() if rank in b.ranks()]
    if not ranks or not a.steps(ranks[0]) or not b.steps(ranks[0]):
        return {}
    frames = [StepFrame(s.table(ranks[0], s.steps(ranks[0])[0])) for s in (a, b)]
    first, second = map(_modules, frames)
    known = set(second)
    if not first or sum(path in known for path in first) >= _ENOUGH * len(first):
        return {}
    weights = [_weights(frame) for frame in frames]
    _by_values(first, second, weights)
    sizes = [{path: _sizes(values) for path, values in one.items()} for one in weights]
    paths_a, paths_b = list(first), list(second)
    matcher = difflib.SequenceMatcher(None, [first[p] for p in paths_a], [second[p] for p in paths_b], autojunk=False)
    pairs = {}
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            old, new = paths_a[block.a + i], paths_b[block.b + i]
            if old != new and sizes[0].get(old, "") == sizes[1].get(new, ""):
                pairs[old] = new
    return pairs


def _modules(frame: StepFrame) -> dict[str, str]:
    """Return each module's path with what it computes in the forward, in the order of its first operator."""
    found: dict[str, list[str]] = {}
    for node in frame.nodes:
        if node.kind in ("op", "module") and node.phase == "forward":
            shape = frame.shapes[node.outputs[0]] if node.outputs else ()
            name = canonical(node.op) if node.kind == "op" else "module"
            found.setdefault(node.module, []).append(f"{name}{list(shape)}")
    return {path: " ".join(tokens) for path, tokens in found.items()}


def _weights(frame: StepFrame) -> dict[str, str]:
    """Return what the parameters of each module hold, to five digits, whatever their names and shapes."""
    found: dict[str, list[str]] = {}
    for node in frame.nodes:
        if node.kind == "parameter" and node.outputs:
            n = numbers_of(frame, node.outputs[0])
            found.setdefault(node.module, []).append(f"{n.count} {n.l2:.4e} {n.min:.4e} {n.max:.4e}")
    return {path: "; ".join(sorted(values)) for path, values in found.items()}


def _sizes(weights: str) -> str:
    """Return how many elements the parameters of `_weights` have."""
    return "; ".join(values.partition(" ")[0] for values in weights.split("; "))


def _by_values(first: dict[str, str], second: dict[str, str], weights: list[dict[str, str]]) -> None:
    """Have modules known by the values of their parameters, if enough of these are in both runs."""
    shared = set(weights[0].values()) & set(weights[1].values())
    fewest = min(sum(values in shared for values in one.values()) / max(1, len(one)) for one in weights)
    if len(shared) < _TELLING or fewest < _ENOUGH_WEIGHTS:
        return
    for side, (modules, held) in enumerate(zip((first, second), weights, strict=True)):
        for path in modules.keys() & held.keys():
            modules[path] = held[path] if held[path] in shared else f"only {side}: {path}"
