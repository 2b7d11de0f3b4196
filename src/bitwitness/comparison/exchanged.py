"""A gradient that only one run reduces over its ranks: seen by what the ranks' optimizers read, not by any operator."""

from __future__ import annotations

import pyarrow.compute as pc

from bitwitness.comparison.chains import parameter_of
from bitwitness.comparison.lined import Place
from bitwitness.comparison.suspect import Suspect
from bitwitness.store.source import Source

_SAME = 1e-6
"""Relative difference of two ranks' sketches up to which they read the same gradient."""


def not_exchanged(suspect: Suspect, a: Source, b: Source, place: Place) -> str | None:
    """Say that ranks read one gradient in one run and each its own in the other, if that is what an edited one is about."""
    if suspect.reason != "edited" or suspect.pair is None:
        return None
    node = suspect.pair.a
    name = node.module if node.kind == "optimizer" else parameter_of(node)
    first, second = (_is_shared(source, step, name) for source, step in ((a, place.step), (b, place.step_b)))
    if first is None or second is None or first == second:
        return None
    one, other = ("A", "B") if first else ("B", "A")
    return (
        f"the gradient of {name} is the same on all ranks in run {one}, and each rank's own in run {other}: it is not "
        "reduced over the ranks there (a missing all-reduce)"
    )


def _is_shared(source: Source, step: int, name: str) -> bool | None:
    """Return whether all ranks' optimizers read the same gradient of a parameter; None where that was not recorded."""
    ranks = source.ranks()
    found = [_read(source, rank, step, name) for rank in ranks]
    known = [one for one in found if one is not None]
    if len(ranks) < 2 or len(known) < len(ranks):
        return None
    return all(abs(one - known[0]) <= _SAME * max(abs(one), abs(known[0])) for one in known)


def _read(source: Source, rank: int, step: int, name: str) -> float | None:
    """Return the sketch of the gradient that a rank's optimizer read."""
    table = source.table(rank, step).select(["kind", "module", "slot", "sketch"])
    wanted = {"kind": "optimizer", "module": name, "slot": "grad"}
    for column, value in wanted.items():
        table = table.filter(pc.equal(table.column(column).cast("string"), value))
    numbers = table.column("sketch").drop_null().to_pylist()
    return float(numbers[0]) if numbers else None
