"""Choices that go by the order of values (topk, argmax): where a small difference tips one, all behind it differs by much.

A mixture's router that chooses another expert for one token gives its experts other tokens. What reads them has other sizes
then, and is no counterpart of the other run's; the choice is where the runs part, and what its values were made by is why.
"""

from __future__ import annotations

import math
from dataclasses import replace

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.measuring.describe import by_each, in_chain
from bitwitness.comparison.measuring.relation import in_words
from bitwitness.comparison.suspect import Suspect, is_regrouped, suspect_of
from bitwitness.oracle.names import canonical

_CHOOSING = ("argmax", "argmin", "argsort", "kthvalue", "max", "min", "msort", "sort", "topk")


def choice_first(suspects: list[Suspect], differences: Differences) -> list[Suspect]:
    """Return a step's suspects; where the first only follows from a choice, the choice before them.

    It does if what is handed on has other sizes, or goes back in the module that has chosen.
    """
    first = min(suspects, key=lambda one: one.order, default=None)
    if first is None or first.reason != "missing":
        return suspects
    module, _, call = first.site.partition("/")
    for pair in differences.alignment.pairs:
        if pair.a.rows[-1] >= first.order[1]:
            break
        back = ":backward" in call and f"{module}.".startswith(f"{pair.a.module}.")
        if not back and not is_regrouped(first):
            continue
        if (found := _tipped(pair, differences)) is not None:
            return [_suspect(first, pair, *found, differences), *_others_first(suspects, first, pair, differences)]
    return suspects


def _others_first(suspects: list[Suspect], first: Suspect, choice: Pair, differences: Differences) -> list[Suspect]:
    """Return suspects, those before all else that need not come of what rounding tips.

    Weights that differ from the beginning; operators of the module that chooses of which the other run has none in it.
    """
    begun = {id(one) for one in suspects if one.reason == "source" and one.pair and one.pair.a.kind == "parameter"}
    begun |= {id(one) for one in suspects if _is_of_one_run(one, choice.a.module, differences)}
    return [replace(one, order=(first.order[0], -1)) if id(one) in begun else one for one in suspects]


def _is_of_one_run(suspect: Suspect, module: str, differences: Differences) -> bool:
    lone, place = suspect.lone, ("op", "forward", module)
    if suspect.reason != "missing" or lone is None or (lone.kind, lone.phase, lone.module) != place:
        return False
    other = differences.a if suspect.side == "b" else differences.b
    there = {canonical(node.op) for node in other.nodes if (node.kind, node.phase, node.module) == place}
    return canonical(lone.op) not in there


def chooses_otherwise(differences: Differences, module: str) -> bool:
    """Return whether integers that a module computes (an order of tokens) are others in each run of two precisions."""
    pairs = differences.alignment.pairs if differences.precisions is not None else ()
    found = (rows[0] for pair in pairs if pair.a.kind == "op" and pair.a.module == module for rows in pair.outputs)
    return any(differences.a.text("dtype", row) == "int64" and differences.change_of[row] > 0 for row in found)


def _tipped(pair: Pair, differences: Differences) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the values that a choice went by and what was chosen, rows of A and B, if rounding tipped it."""
    a, b = differences.a, differences.b
    if (pair.a.kind, pair.a.phase) != ("op", "forward") or canonical(pair.a.op) not in _CHOOSING:
        return None
    chosen = [rows for rows in pair.outputs if a.text("dtype", rows[0]) == "int64"]
    differing = [rows for rows in chosen if differences.change_of[rows[0]] > 0]
    if not differing or not pair.inputs or not differences.change_of[pair.inputs[0][0]] > 0:
        return None
    return None if a.count[differing[0][0]] != b.count[differing[0][1]] else (pair.inputs[0], differing[0])


def _suspect(
    like: Suspect, pair: Pair, values: tuple[int, int], chosen: tuple[int, int], differences: Differences
) -> Suspect:
    """Return the choice as a suspect: of the operators that made its values, where those are each run's own."""
    a, b = differences.a, differences.b
    lone = differences.makers.lone(*values)
    dtypes = differences.dtypes(*values)
    in_dtype = [f" in {dtype}" if dtypes[0] != dtypes[1] else "" for dtype in dtypes]
    group = None
    for node, first in ((lone[0], True), (lone[1], False)):
        group = group or (differences.makers.group(node, first=first) if node is not None else None)
    made = "" if dtypes[0] == dtypes[1] else f" and are {dtypes[0]} in run A and {dtypes[1]} in run B"
    if group is not None:
        ways = [in_chain(nodes) + where for nodes, where in zip((group.a, group.b), in_dtype, strict=True)]
        made = f" and are computed {by_each(*ways)}"
    text = (
        f"it chooses otherwise ({in_words(a, b, *chosen)}), by values that differ little "
        f"({differences.change_of[values[0]]:.2g}){made}; what follows works on other elements"
    )
    reason = "dtype" if dtypes[0] != dtypes[1] else "choice"
    change, explained = differences.change_of[values[0]], like.explained
    found = suspect_of(
        pair, a, chosen[0], rank=like.rank, step=like.step, reason=reason, text=text, change=change, explained=explained
    )
    return replace(found, score=math.inf, clean=False)
