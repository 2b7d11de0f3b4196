"""Modules whose inside was recorded, too: there operators are looked at themselves; where all are others, the module is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import Node
from bitwitness.comparison.measuring.allowance import roundoff
from bitwitness.comparison.measuring.describe import by_each
from bitwitness.comparison.measuring.relation import in_words
from bitwitness.comparison.precisions.otherwise import computing
from bitwitness.comparison.reasons.given import given_alone
from bitwitness.comparison.suspect import Suspect
from bitwitness.oracle.names import CONSTANT

_OF_OPERATORS = ("missing", "source", "view")
"""Reasons of a suspect that may be a way of writing."""
_FILLED = ("full", "zeros", "ones", "scalar_tensor")
"""What holds one number, whatever it is for; positions (``arange``) are computed with."""
APART = "its inputs agree and its result does not; inside, the runs compute with other operators"


class Inside:
    """Knows of which modules of one step operators are recorded."""

    def __init__(self, differences: Differences) -> None:
        self._differences = differences
        self.real: set[str] = set()
        """Modules with results that differ by more than rounding explains, so far."""

    def is_seen(self, pair: Pair) -> bool:
        """Return whether a module's result was made by an operator that is recorded itself."""
        inside = f"{pair.a.module}." if pair.a.module != "." else ""
        late = self._differences.parted_before
        if late and any(path.startswith(inside) and path != pair.a.module for path in self.real):
            return True
        return pair.a.module in self._with_operators

    @cached_property
    def _with_operators(self) -> set[str]:
        """The modules of which operators are recorded, and all modules around them."""
        found: set[str] = set()
        for path in {pair.a.module for pair in self._differences.alignment.pairs if pair.a.kind == "op"}:
            parts = path.split(".")
            found |= {".".join(parts[:i]) for i in range(1, len(parts) + 1)} | {"."}
        return found


def computes_another(differences: Differences, pair: Pair) -> bool:
    """Return whether two operators in one place are no counterparts.

    Their names differ, and the sizes of their results; or they fill a tensor of real numbers in one run alone: a mask that is
    added, and one that chooses.
    """
    if pair.a.kind != "op" or not pair.outputs:
        return False
    if pair.a.op != pair.b.op:
        return all(differences.a.count[i] != differences.b.count[j] for i, j in pair.outputs)
    real = [roundoff(dtype) > 0.0 for dtype in differences.dtypes(*pair.outputs[0])]
    return pair.a.op in (*CONSTANT, *_FILLED) and real[0] != real[1]


def with_module(suspect: Suspect, apart: Mapping[str, Suspect], differences: Differences) -> Suspect:
    """Say of the module that a suspect is in what is certain, where both runs compute with operators of their own.

    In there: that its inputs agree and its result does not. Before it: that it is given something else.

    Parameters
    ----------
    apart
        Modules whose inputs agree and whose results do not, by path.

    """
    given = _given_another(suspect, differences) or _given_more(suspect, differences)
    if given is not None:
        return given
    path = suspect.site.rpartition("/")[0]
    while path not in apart and "." in path:
        path = path.rpartition(".")[0]
    if suspect.reason not in _OF_OPERATORS or path not in apart:
        return suspect
    lone = [differences.alignment.lone(first=first) for first in (True, False)]
    inside = [any(node.kind == "op" and f"{node.module}.".startswith(f"{path}.") for node in nodes) for nodes in lone]
    if not all(inside):
        return suspect
    module = apart[path].site.rpartition("#")[0]
    return replace(suspect, text=f"{module}: {APART}, of which the first that matters is this: {suspect.text}")


def _given_more(suspect: Suspect, differences: Differences) -> Suspect | None:
    """Return that the module which an operator of one run alone is in is given something in one run alone."""
    if suspect.reason != "missing" or suspect.lone is None or suspect.lone.module == ".":
        return None
    place = "module", "forward", suspect.lone.module, suspect.lone.micro
    for pair in differences.alignment.pairs:
        if (pair.a.kind, pair.a.phase, pair.a.module, pair.a.micro) == place and (
            text := given_alone(differences, pair)
        ):
            module = pair.a.site.rpartition("#")[0]
            said = (
                f"{module}: called with other arguments: {text}; inside, the first that matters is this: {suspect.text}"
            )
            return replace(suspect, text=said)
    return None


def _given_another(suspect: Suspect, differences: Differences) -> Suspect | None:
    """Return what the module that a suspect is in reads, if that differs and an operator made it that only one run has."""
    if suspect.reason != "missing" or suspect.lone is None:
        return None
    path = suspect.lone.module
    for pair in differences.alignment.pairs:
        if (pair.a.kind, pair.a.phase, pair.a.module) != ("module", "forward", path):
            continue
        for row_a, row_b in pair.inputs:
            first, second = differences.makers.lone(row_a, row_b)
            if not differences.is_real(pair.a, row_a):
                continue
            site = f"{pair.a.site}.{differences.a.text('slot', row_a)}"
            words = in_words(differences.a, differences.b, row_a, row_b)
            if first is not None and second is not None:
                makers = by_each(_named(first), _named(second))
                return replace(suspect, site=site, text=f"it is computed {makers}, with other results ({words})")
            side, lone = ("A", first) if second is None else ("B", second)
            if lone is not None and lone.module != path and computing([lone]):
                text = f"only run {side} has it, and its result matters to {site} ({words})"
                stack = int((differences.b if side == "B" else differences.a).stack[lone.rows[0]])
                return replace(suspect, site=f"{lone.site}.out0", text=text, side=side.lower(), stack=stack, lone=lone)
    return None


def _named(node: Node) -> str:
    return f"{node.op} of {'the model itself' if node.module == '.' else node.module}"
