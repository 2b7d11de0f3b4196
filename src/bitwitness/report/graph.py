"""The part of a computation's graph around the first wrong operator: who made what it read, and who read what it made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.frame import Node
from bitwitness.comparison.suspect import Suspect
from bitwitness.report.clean import name

_UP, _DOWN = 3, 2  # generations of operators before and after
_MOST = 40  # operators: more do not fit a screen
STATES = {
    "first": "the first that is wrong",
    "differs": "differs",
    "rounding": "differs by rounding",
    "equal": "equal in both",
    "alone": "only one run has it",
}


@dataclass(slots=True)
class Graph:
    """Operators and who gives to whom, both runs in one; ``nodes``: id, label, state, and what is said of it."""

    nodes: list[dict[str, Any]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=lambda: dict(STATES))

    def to_dict(self) -> dict[str, Any]:
        """Return it for the page."""
        return asdict(self)


def graph_around(first: Suspect, differences: Differences) -> Graph:
    """Return the graph around a suspect, as far as its step was recorded; empty where its operator is not in it."""
    second = first.side == "b"
    frame = differences.b if second else differences.a
    nodes = {node.number: node for node in frame.nodes if node.kind in ("op", "module", "collective", "optimizer")}
    centre = next((node for node in nodes.values() if _is(node, first)), None)
    if centre is None:
        return Graph()
    nodes = {number: node for number, node in nodes.items() if node.kind == centre.kind or node.kind != "module"}
    made_by = {
        number: [m for m in _makers(node, frame) if m in nodes and m != number] for number, node in nodes.items()
    }
    read_by: dict[int, list[int]] = {}
    for number, makers in made_by.items():
        for maker in makers:
            read_by.setdefault(maker, []).append(number)
    kept = dict.fromkeys([centre.number])
    for generations, around in ((_UP, made_by), (_DOWN, read_by)):
        edge = [centre.number]
        for _ in range(generations):
            edge = [one for number in edge for one in around.get(number, ()) if one not in kept][: _MOST - len(kept)]
            kept |= dict.fromkeys(edge)
    told = [_told(nodes[number], centre, differences, second=second) for number in kept]
    edges = dict.fromkeys((maker, number) for number in kept for maker in made_by[number] if maker in kept)
    return Graph(told, list(edges))


def _is(node: Node, first: Suspect) -> bool:
    return first.site.startswith(node.site) and node.micro == first.micro


def _makers(node: Node, frame: Any) -> Iterator[int]:
    return (int(frame.producer[row]) for row in node.inputs)


def _told(node: Node, centre: Node, differences: Differences, *, second: bool) -> dict[str, Any]:
    pairs = differences.alignment.pairs
    pair = next((one for one in pairs if (one.b if second else one.a).number == node.number), None)
    change = 0.0
    if node.number == centre.number:
        state = "first"
    elif pair is None:
        state = "alone"
    else:
        change = max((differences.change_of[row] for row, _ in pair.outputs), default=0.0)
        state = "equal" if change == 0.0 else "differs" if pair.a.number in differences.real else "rounding"
    if pair is not None:
        change = max((differences.change_of[row] for row, _ in pair.outputs), default=0.0)
    said = STATES[state] if pair is None else f"{STATES[state]}; relative change {change:.3g}"
    return {
        "id": node.number,
        "op": name(node.op),
        "module": name(node.module),
        "phase": node.phase,
        "state": state,
        "said": said,
    }
