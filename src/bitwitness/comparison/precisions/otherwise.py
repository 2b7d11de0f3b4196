"""What two runs compute by different operators, where they compute so coarsely that small differences in kind do not show.

Two formulas of one activation differ by less than bfloat16's rounding: that they agree says little, so they are named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from bitwitness.comparison.differences import FINE, Differences
from bitwitness.comparison.gradients.scalers import scales_of
from bitwitness.comparison.matching.frame import Node
from bitwitness.comparison.matching.tokens import CASTS
from bitwitness.comparison.measuring.describe import by_each, in_chain
from bitwitness.oracle.names import PRODUCTS, canonical

_VIEWS = (
    "alias",
    "expand",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "squeeze",
    "t",
    "transpose",
)
MOVES = frozenset((*CASTS, *_VIEWS, "clone", "copy_", "detach", "unsafe_view", "unsqueeze", "view"))
"""Operators that compute nothing."""
_LINEAR = frozenset((*PRODUCTS, "add", "mul", "sum"))
"""Of which there is one formula, whatever a kernel is called."""


class Otherwise(NamedTuple):
    """One formula in other operators, or in another dtype: in which module first, and by what in each run."""

    module: str
    a: str
    b: str


def written_otherwise(differences: Differences) -> Iterator[Otherwise]:
    """Yield what is computed by other operators in each run, of a step that is computed in a coarse dtype in one of them."""
    coarse = max(differences.coarse, differences.roundoff_inside if differences.precisions is not None else 0.0)
    if coarse <= FINE:
        return
    yield from _in_other_dtypes(differences)
    if differences.precisions is not None:
        yield from _in_one_run(differences)
    for group in differences.alignment.groups:
        first, second = computing(group.a), computing(group.b)
        if group.a[0].phase != "forward" or not first or not second:
            continue
        names = [{canonical(node.op) for node in nodes} for nodes in (first, second)]
        if names[0] != names[1] and not all(found <= _LINEAR for found in names):
            yield Otherwise(group.a[0].module, in_chain(first), in_chain(second))


def _in_other_dtypes(differences: Differences) -> Iterator[Otherwise]:
    """Yield modules that compute in another dtype in each run, where the runs as a whole compute in one."""
    told: set[str] = set()
    for pair in differences.alignment.pairs if differences.precisions is None else ():
        if (pair.a.kind, pair.a.phase) != ("op", "forward") or not pair.outputs or not computing([pair.a]):
            continue
        first, second = differences.dtypes(*pair.outputs[0])
        if first != second and "float" in first and "float" in second and pair.a.module not in told:
            told.add(pair.a.module)
            yield Otherwise(pair.a.module, f"{pair.a.op} in {first}", f"{pair.b.op} in {second}")


def _in_one_run(differences: Differences) -> Iterator[Otherwise]:
    """Yield modules, and the script, that compute something in one run only: what comes of it may be less than rounding."""
    for one in computed_alone(differences):
        chains = in_chain(one.nodes), "none of these"
        yield Otherwise(one.nodes[0].module, *(chains if one.first else reversed(chains)))


class Alone(NamedTuple):
    """What one module, or the script, computes forward in one run, where the other's has nothing of its own; whose it is."""

    nodes: list[Node]
    first: bool


def computed_alone(differences: Differences) -> list[Alone]:
    """Return what is computed in one run only, module by module; neither constants nor a loss scale."""
    found: list[dict[str, list[Node]]] = [{}, {}]
    for by, first in zip(found, (True, False), strict=True):
        frame = differences.a if first else differences.b
        for node in computing(differences.alignment.lone(first=first)):
            if (node.kind, node.phase) == ("op", "forward") and node.inputs and not scales_of(frame, node):
                by.setdefault(node.module, []).append(node)
    both = found[0].keys() & found[1].keys()
    sides = zip(found, (True, False), strict=True)
    return [Alone(nodes, first) for by, first in sides for module, nodes in by.items() if module not in both]


def in_words(found: Collection[Otherwise]) -> str:
    """Say which is the first of some, and how many more there are."""
    first = next(iter(found))
    more = f" (and so in {len(found) - 1} other places)" if len(found) > 1 else ""
    return (
        f"{first.module} is computed {by_each(first.a, first.b)}{more}, and whether these are one formula "
        "cannot be told in that precision"
    )


def computing(nodes: Iterable[Node]) -> list[Node]:
    """Return those that compute something, and not only cast or move it."""
    return [node for node in nodes if canonical(node.op) not in MOVES]
