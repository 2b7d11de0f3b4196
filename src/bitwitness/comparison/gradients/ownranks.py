"""Gradients that each rank has its own of, where ranks are put together: what is left of them is by which moment they are one.

A gradient is recorded as complete when something is about to change it, or an optimizer to read it. Where each rank's is its
own then, and yet all optimizers read one, ranks changed theirs before they were averaged: a mean of clipped gradients is no
clipped mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bitwitness.comparison.matching.frame import StepFrame, parameter_of
from bitwitness.comparison.matching.together import Cells, same

OWN = "own"
"""Under which a table's metadata tell it."""
NOT_REDUCED = "it is not reduced over the ranks there (a missing all-reduce)"
CHANGES_ITS_OWN = "(clips it, scales it, edits it) before the ranks' are put together"
"""What is said of either."""


def own_of_ranks(ranks: Sequence[Mapping[tuple[Any, ...], Cells]]) -> str:
    """Return, as JSON, the parameters whose gradient is each rank's own: when complete, and when optimizers read it.

    ``ranks``: the rows of each, by what they are.
    """
    found: dict[str, list[str]] = {"gradient": [], "optimizer": []}
    first, *others = ranks
    for key, row in first.items():
        if row["kind"] not in found or row["placement"] or (row["kind"] == "optimizer" and row["slot"] != "grad"):
            continue
        if any(key in rows and not same(row, rows[key]) for rows in others):
            path = row["module"]
            found[row["kind"]].append(path if row["kind"] == "optimizer" else parameter_of(path, row["op"]))
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
