"""A factor of gradients that comes in late: not with the loss, but in the modules that the parameters are in.

An adapter whose results are zero as yet returns the same under any scale, and its gradients have it all.
"""

from __future__ import annotations

from collections.abc import Iterable

from bitwitness.comparison.differences import Differences

_AGREES = 1e-3
"""Relative change up to which what comes back to a module agrees, where gradients have another factor."""
_MOST = 0.9
"""Share of the parameters whose modules are given back the same."""


def scaled_within(differences: Differences, parameters: Iterable[str]) -> str:
    """Name the modules that have these parameters, if what comes back to them agrees; empty if not, or if nothing tells."""
    told: dict[str, bool] = {}
    for pair in differences.alignment.pairs:
        if (pair.a.kind, pair.a.phase) == ("module", "backward") and pair.inputs and pair.a.module != ".":
            changes = [differences.change_of[i] for i, _ in pair.inputs]
            told[pair.a.module] = told.get(pair.a.module, True) and max(changes) <= _AGREES
    names = list(parameters)
    inside = [path for name in names if told.get(path := name.rpartition(".")[0])]
    if not inside or len(inside) < _MOST * len(names):
        return ""
    more = len(set(inside)) - 1
    return inside[0] + (f" and {more} other module{'s' * (more > 1)}" if more else "")
