"""Gradients that each rank has its own of, where ranks are put together: what is left of them is by which moment they are one.

A gradient is recorded as complete when something is about to change it, or an optimizer to read it. Where each rank's is its
own then, and yet all optimizers read one, ranks changed theirs before they were averaged: a mean of clipped gradients is no
clipped mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bitwitness.comparison.frame import StepFrame

OWN = "own"
"""Under which a table's metadata tell it."""

Cells = Mapping[str, Any]


def own_of_ranks(ranks: Sequence[Mapping[tuple[Any, ...], Cells]], same: Callable[[Any, Any], bool]) -> str:
    """Return, as JSON, the parameters whose gradient is each rank's own: when complete, and when optimizers read it.

    Parameters
    ----------
    ranks
        The rows of each rank, by what they are.
    same
        Whether two rows hold the same values.

    """
    found: dict[str, list[str]] = {"gradient": [], "optimizer": []}
    first, *others = ranks
    for key, row in first.items():
        if row["kind"] not in found or row["placement"] or (row["kind"] == "optimizer" and row["slot"] != "grad"):
            continue
        if any(key in rows and not same(row, rows[key]) for rows in others):
            path = row["module"]
            complete = row["op"] if path == "." else f"{path}.{row['op']}"
            found[row["kind"]].append(path if row["kind"] == "optimizer" else complete)
    return json.dumps(found)


def changed_before(frame: StepFrame, name: str) -> bool:
    """Tell whether each rank changed its own gradient of a parameter before they were put together."""
    own = _of(frame)
    return name in own["gradient"] and name not in own["optimizer"]


def never_shared(frame: StepFrame, name: str) -> bool:
    """Tell whether each rank's optimizer reads a gradient of its own."""
    return name in _of(frame)["optimizer"]


def _of(frame: StepFrame) -> dict[str, list[str]]:
    words = (frame.table.schema.metadata or {}).get(OWN.encode())
    found: dict[str, list[str]] = json.loads(words) if words else {"gradient": [], "optimizer": []}
    return found
