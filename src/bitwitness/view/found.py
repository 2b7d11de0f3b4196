"""What is known of a node beside what was recorded of it: its state, why, and how far it is from the other run's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import UNKNOWN
from bitwitness.view.colours import State
from bitwitness.view.graph import Graph, GraphNode


@dataclass(slots=True)
class Found:
    """What was found of a node; ``other``: the site in the other run, where that is another one."""

    state: State
    text: str = ""
    change: float | None = None
    other: str = ""


Pairs = list[tuple[int, int]]
"""Numbers of the nodes of A and B that are the same."""


def of_pairs(differences: Differences) -> tuple[Pairs, dict[int, Found], dict[int, Found]]:
    """Return what matches what in a compared step, and what was found of the nodes of A and of B, by number."""
    pairs: Pairs = []
    of_a: dict[int, Found] = {}
    of_b: dict[int, Found] = {}
    for pair in differences.alignment.pairs:
        pairs.append((pair.a.number, pair.b.number))
        state, change = _state(differences, pair)
        renamed = pair.a.site != pair.b.site
        of_a[pair.a.number] = Found(state, change=change, other=pair.b.site if renamed else "")
        of_b[pair.b.number] = Found(state, change=change, other=pair.a.site if renamed else "")
    for first, found in ((True, of_a), (False, of_b)):
        for node in differences.alignment.lone(first=first):
            found[node.number] = Found(State.UNMATCHED, "the other run has no counterpart")
    return pairs, of_a, of_b


def _state(differences: Differences, pair: Pair) -> tuple[State, float | None]:
    rows = pair.outputs or pair.inputs
    changes = [differences.change_of[row] for row, _ in rows if row in differences.change_of]
    if not changes:
        return State.SEEN, None
    change = max(changes, key=lambda one: float("inf") if one != one else one)  # noqa: PLR0124 - NaN is the largest
    if change == 0:
        return State.EQUAL, 0.0
    real = pair.a.number in differences.real
    if pair.a.number not in differences.largest:  # what makes nothing of its own: a parameter, a buffer
        real = any(not differences.is_noise(pair, row) for row, _ in rows)
    return (State.PASSED_ON if real else State.ROUNDING), change


def nonfinite(graph: Graph) -> dict[str, Found]:
    """Return which nodes of a single run show NaN or Inf, and which of them made it: all that they read was finite."""
    found = {}
    for node in graph.nodes:
        if not any(_bad(node, row) for row in node.rows_out):
            continue
        # A parameter or a gradient is shown as it is, and nobody's result.
        read = any(_bad(node, row) for row in node.rows_in) or node.kind not in ("op", "module", "collective")
        state = State.PASSED_ON if read else State.MADE_HERE
        words = ", ".join(f"{value.slot}: {told}" for value in node.outputs if (told := _counts(value.stats)))
        found[node.id] = Found(state, f"{words}; {'it was there before' if read else 'all that it reads is finite'}")
    return found


def _bad(node: GraphNode, row: int) -> bool:
    """Tell whether a value is no number; minus infinity alone is how attention masks are written."""
    counts = node.frame.counts
    return any(counts[name][row] not in (0, UNKNOWN) for name in ("nan", "pos_inf"))


def _counts(stats: Mapping[str, object]) -> str:
    names = {"nan": "NaN", "pos_inf": "Inf", "neg_inf": "-Inf"}
    return ", ".join(f"{stats[key]} {word}" for key, word in names.items() if stats.get(key))


def accuse(found: dict[str, Found], graph: Graph, sites: Iterable[tuple[str, str]]) -> None:
    """Mark the nodes that somebody else names: a guard's finding, by site and message."""
    by_site: dict[str, list[GraphNode]] = {}
    for node in graph.nodes:
        by_site.setdefault(node.site, []).append(node)
    for site, text in sites:
        for node in by_site.get(site, ()):
            found[node.id] = Found(State.MADE_HERE, text)


def suspects_of(graph: Graph, found: Mapping[str, Found]) -> Iterator[dict[str, str]]:
    """Yield the nodes that made something, in the order of execution."""
    for node in graph.nodes:
        one = found.get(node.id)
        if one is not None and one.state is State.MADE_HERE:
            yield {"id": node.id, "site": node.site, "text": one.text}
