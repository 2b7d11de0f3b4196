"""By which operators a loss is made of what the model's parts return, where only parts of a batch can be held side by side.

Micro-batches that weigh otherwise and a loss of another function look the same in gradients: results agree, and gradients
differ by no one factor. What the losses are computed by tells the one from the other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.describe import by_each
from bitwitness.comparison.measuring.relation import factor
from bitwitness.comparison.precisions.otherwise import MOVES
from bitwitness.oracle.names import canonical

LOSS = "loss"
"""Under which a table's metadata tell of its `LossOperator`, which it does not have any more."""
_SHOWN = 8
_ONE_NUMBER = 1e-3
"""Relative difference of losses' ratios up to which they are one."""


class LossOperator(NamedTuple):
    """One: its name, and where it was called from."""

    op: str
    stack: int


class Apart(NamedTuple):
    """Two losses by other operators: what is said of them, and the first operator that only one of them has."""

    text: str
    side: str
    stack: int


def told(rows: Iterable[dict[str, Any]]) -> str:
    """Return the operators of a step's first micro-batch for the metadata.

    They are the script's own and the model's own behind its last part. What only scales a single number is left out, as how
    micro-batches are weighed differs where they are weighed rightly.
    """
    nodes: dict[int, list[dict[str, Any]]] = {}
    micro = None
    for row in rows:
        micro = row["micro"] if micro is None else micro
        if row["phase"] != "forward" or row["micro"] != micro or row["recomputed"]:
            continue
        if row["kind"] == "module" and row["module"] != ".":
            nodes.clear()
        elif row["kind"] == "op" and row["module"] == ".":
            nodes.setdefault(row["node"], []).append(row)
    found = [
        (row[0]["op"], row[0]["stack"] if row[0]["stack"] is not None else -1)
        for row in nodes.values()
        if canonical(row[0]["op"]) not in MOVES and max(one["count"] or 0 for one in row) > 1
    ]
    return json.dumps(found)


def operators(frame: StepFrame) -> list[LossOperator]:
    """Return what the metadata tell."""
    text = (frame.table.schema.metadata or {}).get(LOSS.encode())
    return [LossOperator(*one) for one in json.loads(text)] if text else []


def computed_otherwise(a: StepFrame, b: StepFrame) -> Apart | None:
    """Return that two runs' losses are made by other operators, if they are."""
    first, second = operators(a), operators(b)
    counts = [Counter(canonical(one.op) for one in found) for found in (first, second)]
    if not first or not second or counts[0] == counts[1]:
        return None
    side, one = _only(second, counts[1] - counts[0], "b") or _only(first, counts[0] - counts[1], "a") or ("", second[0])
    return Apart(f"the loss is made {by_each(_in_chain(first), _in_chain(second))}", side, one.stack)


def _only(found: list[LossOperator], more: Counter[str], side: str) -> tuple[str, LossOperator] | None:
    return next(((side, one) for one in found if canonical(one.op) in more), None)


def _in_chain(found: list[LossOperator]) -> str:
    names = [canonical(one.op) for one in found]
    return ", ".join([*names[:_SHOWN], "…"] if len(names) > _SHOWN else names)


def loss_ratio(differences: Differences) -> float | None:
    """Return how many times run B's losses are run A's; None if by no one number, or if they were not recorded."""
    losses = differences.alignment.losses
    found = [factor(differences.a, pair.a.outputs[0], differences.b, pair.b.outputs[0]) for pair in losses]
    ratios = [one for one in found if one is not None]
    if not ratios or len(ratios) < len(found):
        return None
    return ratios[0] if max(ratios) - min(ratios) <= _ONE_NUMBER * abs(ratios[0]) else None
