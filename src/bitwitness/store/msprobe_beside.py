"""The files beside msprobe's ``dump.json``: ``stack.json``, where entries were called, and ``construct.json``, by what.

``stack.json`` is ``{"0": [[names], [lines]], …}``, and of older releases ``{name: [lines], …}``; ``construct.json`` is
``{name: parent}``, with ``[parent, micro-batch]`` where there are several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bitwitness.files.shown import quoted
from bitwitness.store.msprobe_entry import Malformed

LARGEST_MICRO = (1 << 31) - 1  # what a column of rows holds


def stack_entry(key: str, entry: Any) -> tuple[list[str], list[str]]:
    """Return the names of a stack's entries, and its lines, innermost first; raises `Malformed`."""
    if _texts(entry):
        return [key], entry
    if isinstance(entry, list) and len(entry) == 2 and all(map(_texts, entry)):
        names, lines = entry
        return names, lines
    raise Malformed(f"{quoted(entry)}; expected names and the lines that called them")


def parent_of(entry: Any) -> tuple[str, int] | None:
    """Return the name of the module in which an entry ran (empty for none), and the micro-batch; None if it makes no sense."""
    parent, micro = entry if isinstance(entry, list) and len(entry) == 2 else (entry, 0)
    if parent is not None and not isinstance(parent, str):
        return None
    if type(micro) is not int or not 0 <= micro <= LARGEST_MICRO:
        return None
    return parent or "", micro


def wrong_parents(parents: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each entry of ``construct.json`` that makes no sense."""
    for name, entry in parents.items():
        if parent_of(entry) is None:
            yield f"{quoted(name)}: {quoted(entry)}; expected a module's name, alone or with the micro-batch"


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
