"""Each parameter's gradient on its way: as the backward left it, complete and reduced, as the optimizer read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.frame import StepFrame, parameter_of
from bitwitness.comparison.measuring.allowance import rms
from bitwitness.comparison.measuring.relation import factor, numbers_of

STAGES = ("backward", "reduced", "read")
"""As the backward left it; complete, and before any clipping; as the optimizer read it."""

_SMALLEST = 2.0**-14
"""The smallest number of which float16 holds all digits."""
_FEW = 4  # groups of parameters that are multiplied by numbers of their own
_NEARLY = 0.1
"""Relative difference of two norms that are one clipping's."""
_ONE_FACTOR = 1e-3
"""Relative difference of two factors up to which they are one."""

Rows = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Chain:
    """One parameter's gradient in both runs: its names, and its rows by `STAGES`, None for what was not recorded."""

    name: str
    name_b: str
    a: Rows
    b: Rows


def chains_of(differences: Differences) -> list[Chain]:
    """Follow each parameter whose complete gradient both runs recorded."""
    a, b = differences.a, differences.b
    locals_a, locals_b = (_local_rows(frame) for frame in (a, b))
    read: dict[str, tuple[int, int]] = {}
    for pair in differences.alignment.pairs:
        if pair.a.kind == "optimizer":
            for rows in pair.inputs:
                if a.text("slot", rows[0]) == "grad":
                    read[pair.a.module] = rows
    chains = []
    for pair in differences.alignment.pairs:
        if pair.a.kind != "gradient" or not pair.outputs or a.text("slot", pair.outputs[0][0]) != "reduced":
            continue
        names = [node.parameter for node in (pair.a, pair.b)]
        i, j = pair.outputs[0]
        last = read.get(names[0], (None, None))
        rows_a, rows_b = (locals_a.get(names[0], i), i, last[0]), (locals_b.get(names[1], j), j, last[1])
        chains.append(Chain(names[0], names[1], rows_a, rows_b))
    return chains


def row_at(rows: Rows, stage: int) -> int | None:
    """Return the row at a stage; what the optimizer reads as it was before has no row of its own."""
    return rows[1] if stage == 2 and rows[2] is None else rows[stage]


def link_of(frame: StepFrame, rows: Rows) -> float | None:
    """Return by what a gradient is multiplied between backward and optimizer; None: by no one number, or it is not known."""
    last = row_at(rows, 2)
    return None if rows[0] is None or last is None else factor(frame, rows[0], frame, last)


def is_rounded_off(frame: StepFrame, rows: Rows, link: float | None) -> bool:
    """Return whether a gradient in float16, multiplied by no one number, is so small there that digits of it are lost."""
    last = row_at(rows, 2)
    return link is None and last is not None and frame.text("dtype", last) == "float16" and rms(frame, last) < _SMALLEST


def is_read_alike(a: StepFrame, b: StepFrame, chain: Chain) -> bool:
    """Return whether both optimizers read the same numbers, to the last bit, as far as statistics tell."""
    i, j = row_at(chain.a, 2), row_at(chain.b, 2)
    return i is not None and j is not None and numbers_of(a, i) == numbers_of(b, j)


def gradients_in(frame: StepFrame, kind: str) -> dict[str, float]:
    """Return the sketch of each parameter's gradient: complete (``gradient``), or as the optimizer read it (``optimizer``)."""
    slot = "grad" if kind == "optimizer" else STAGES[1]
    rows = np.flatnonzero(frame.texts["kind"].equals(kind) & frame.texts["slot"].equals(slot)).tolist()
    modules = [frame.text("module", row) for row in rows]
    if kind != "optimizer":
        ops = [frame.text("op", row) for row in rows]
        modules = list(map(parameter_of, modules, ops))
    return {name: float(frame.numbers["sketch"][row]) for name, row in zip(modules, rows, strict=True)}


def left_in_gradients(frame: StepFrame) -> dict[str, float]:
    """Return the sketch of each parameter's gradient as the optimizer read it, which stays there until it is zeroed."""
    return gradients_in(frame, "optimizer")


def _local_rows(frame: StepFrame) -> dict[str, int]:
    """Return the rows of gradients as the backward left them, by their parameter."""
    found = {}
    for node in frame.nodes:
        if node.kind == "gradient" and node.outputs and frame.text("slot", node.outputs[0]) == "local":
            found[node.parameter] = node.outputs[0]
    return found


def clipped_at(frame: StepFrame, chains: Sequence[Rows]) -> float | None:
    """Return the one largest magnitude of all gradients that changed between backward and step, if they have one."""
    last = [(rows[0], row_at(rows, 2)) for rows in chains]
    changed = [j for i, j in last if i is not None and j is not None and frame.value[i] != frame.value[j]]
    moved = [
        j for i, j in last if i is not None and j in changed and numbers_of(frame, i).l2 != numbers_of(frame, j).l2
    ]
    tops = {numbers_of(frame, row).top for row in moved}
    return tops.pop() if len(moved) > 1 and len(tops) == 1 else None


def norms_since(frame: StepFrame, chains: Sequence[Rows], since: int) -> tuple[float, float]:
    """Return the norm of all gradients together at a stage and when the optimizer reads them."""
    squares = [0.0, 0.0]
    for rows in chains:
        for number, row in enumerate((rows[since], row_at(rows, 2))):
            if row is not None:
                squares[number] += numbers_of(frame, row).l2 ** 2
    return math.sqrt(squares[0]), math.sqrt(squares[1])


def factors_since(frame: StepFrame, chains: Sequence[Rows], since: int) -> list[float]:
    """Return the few numbers by which gradients are multiplied after a stage; empty where there are many."""
    found: list[float] = []
    for rows in chains:
        first, last = rows[since], row_at(rows, 2)
        times = None if first is None or last is None else factor(frame, first, frame, last)
        if times is None:
            return []
        if not any(abs(times - one) <= _ONE_FACTOR * abs(one) for one in found):
            found.append(times)
    return sorted(found) if len(found) <= _FEW else []


def are_one_clipping(by: Sequence[float | None], norms: Sequence[float], limit: float, *, differ: bool) -> bool:
    """Tell whether both runs clip to one norm: gradients whose norm is below it are left as they are.

    Parameters
    ----------
    by
        What each run's gradients are multiplied by; None: no one number.
    norms
        What is left of them.
    limit
        Up to what norms are one.
    differ
        Whether gradients differ before it, by no one factor: norms of those that both runs have, or of this rank's shards, are
        then not quite what is clipped by.

    """
    if any(one is None or not 0 < one <= 1 + limit for one in by):
        return False
    clipped = [norm for one, norm in zip(by, norms, strict=True) if one is not None and one < 1 - limit]
    if len(clipped) == 1:
        return differ and max(norms) <= clipped[0] * (1 + _NEARLY)
    return len(clipped) == 2 and min(clipped) >= max(clipped) * (1 - (_NEARLY if differ else limit))


def in_words_of_change(
    top: float | None, by: float | None, frame: StepFrame, chains: Sequence[Rows], since: int
) -> str:
    """Say what happens to all gradients of a run after a stage.

    Each value is clipped at ``top``, or all are multiplied ``by`` one number, or each group of them by another.
    """
    if top is not None:
        return f"clips each value at {top:.4g}"
    if by == 1.0:
        return "leaves them as they are"
    norms, factors = norms_since(frame, chains, since), factors_since(frame, chains, since)
    if by is not None:
        times = f"multiplies them by {by:.4g}"
    elif len(factors) > 1:
        times = f"multiplies some by {', others by '.join(f'{one:.4g}' for one in factors)}"
    else:
        times = "changes them"
    return f"{times}: their norm is {norms[0]:.4g} before and {norms[1]:.4g} after"
