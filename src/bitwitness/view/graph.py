"""One recorded step of one rank as a hierarchical graph: calls of operators and modules, in groups named like the modules.

::

    forward / layers / 3 / mlp / fc1 / addmm#0

Edges lead from the node that made a value to those that read it. Groups are not nodes: they follow from the nodes' ``group``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.files.shown import shown

_LONGEST = 2_000
"""Characters of one text: a name or an argument in somebody's recording may be a megabyte."""
_LINES = 20
_LONGEST_ID = 300
"""Of an id, which is asked for in an address; two that begin alike are told apart by a number."""
_GROUPS = {"forward": "forward", "backward": "backward", "grad": "gradients", "comm": "communication",
           "optim": "optimizer", "param": "parameters"}  # fmt: skip


@dataclass(slots=True)
class Value:
    """One input or output of a node: its slot, and what is known of it."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    name: str
    stats: dict[str, Any]


@dataclass(slots=True)
class GraphNode:
    """A call as the graph shows it.

    ``id`` is the same for the two of a pair, so that both graphs open at the same place; ``number`` is the recording's own.
    What it read and made is looked up when it is asked for: of 30,000 nodes few are.
    """

    frame: StepFrame
    rows_in: list[int]
    rows_out: list[int]
    id: str
    number: int
    label: str
    group: tuple[str, ...]
    kind: str
    site: str
    micro: int
    args: str
    stack: str
    reads: list[tuple[str, str, str]] = field(default_factory=list)
    """Edges: the node that made it, as which of its outputs, and the slot that reads it."""

    @property
    def inputs(self) -> list[Value]:
        """What it read."""
        return [_value(self.frame, row) for row in self.rows_in]

    @property
    def outputs(self) -> list[Value]:
        """What it made."""
        return [_value(self.frame, row) for row in self.rows_out]

    @property
    def path(self) -> str:
        """The groups around it, in one text."""
        return "/".join(self.group)


@dataclass(slots=True)
class Graph:
    """The nodes in the order of execution, and by their ids."""

    name: str
    nodes: list[GraphNode]

    def by_id(self) -> dict[str, GraphNode]:
        """Return the nodes by their ids."""
        return {node.id: node for node in self.nodes}

    def groups(self) -> set[tuple[str, ...]]:
        """Return all groups, those that hold only other groups included."""
        return {node.group[:depth] for node in self.nodes for depth in range(1, len(node.group) + 1)}


def graph_of(
    name: str,
    frame: StepFrame,
    stacks: Mapping[int, str] | None = None,
    *,
    like: Mapping[int, GraphNode] | None = None,
    used: Iterable[GraphNode] = (),
) -> Graph:
    """Build the graph of a recorded step.

    Parameters
    ----------
    frame
        The step.
    stacks
        Call stacks by the number that rows give.
    like
        Nodes of another graph by the number of the node of this one that is the same: it takes over their id and place, also
        where its module has another name.

    used
        Nodes of the other graph, whose ids no other node may have: what only one run has has none there.

    Returns
    -------
    Graph
        With ids that are unique in it.

    """
    like = like or {}
    taken: dict[str, int] = dict.fromkeys((other.id for other in used), 0)
    nodes: dict[int, GraphNode] = {}
    for node in frame.nodes:
        made = _node(frame, node, stacks or {})
        twin = like.get(node.number)
        if twin is not None:
            made.id, made.group = twin.id, twin.group
        else:
            made.id = _unique(made.id, taken)
        nodes[node.number] = made
    for node in frame.nodes:
        nodes[node.number].reads = list(_edges(frame, node, nodes))
    return Graph(name, list(nodes.values()))


def _node(frame: StepFrame, node: Node, stacks: Mapping[int, str]) -> GraphNode:
    first = node.rows[0]
    site = shown(node.site, _LONGEST)
    place = f"{site}@{node.micro}" if node.micro else site
    return GraphNode(
        frame,
        node.inputs,
        node.outputs,
        id=f"{node.kind}{' again' * node.recomputed} {place}"[:_LONGEST_ID],
        number=node.number,
        label=_label(node),
        group=_group(node),
        kind=node.kind,
        site=site,
        micro=node.micro,
        args=shown(frame.text("args", first), _LONGEST),
        stack=_stack(stacks.get(int(frame.stack[first]), "")),
    )


def _stack(text: str) -> str:
    """Return the script's own lines: below them is the command that ran it."""
    lines = takewhile(lambda line: "bitwitness/cli/" not in line, text.splitlines())
    return "\n".join(shown(line, _LONGEST) for line in islice(lines, _LINES))


def _label(node: Node) -> str:
    name = shown(node.op, 120) or node.kind
    # In ASCII: Model Explorer draws nothing else.
    name = f"[{name}]" if node.kind == "module" else name
    return name + (f" #{node.call}" if node.call else "") + (" (again)" if node.recomputed else "")


def _group(node: Node) -> tuple[str, ...]:
    top = _GROUPS.get(node.phase, shown(node.phase, 40) or "other")
    if node.micro > 0:
        top = f"{top}, micro-batch {node.micro}"
    parts = [] if node.module in (".", "") else node.module.split(".")
    # A slash parts groups in the file format, and a name in somebody's recording may hold one.
    return (top, *(shown(part, 120).replace("/", "∕") or "∅" for part in parts))  # noqa: RUF001 - it looks like a slash


def _value(frame: StepFrame, row: int) -> Value:
    stats = {name: value for name, value in frame.stats(row).items() if value is not None}
    return Value(
        shown(frame.text("slot", row), 120),
        frame.text("dtype", row),
        frame.shapes[row],
        shown(frame.text("name", row), 200),
        stats,
    )


def _edges(frame: StepFrame, node: Node, nodes: Mapping[int, GraphNode]) -> Iterator[tuple[str, str, str]]:
    """Yield what a node reads of others; which of their outputs is told by the value's number."""
    for row in node.inputs:
        maker = nodes.get(int(frame.producer[row]))
        if maker is not None and maker.number != node.number:
            yield maker.id, "0", shown(frame.text("slot", row), 120)


def _unique(name: str, taken: dict[str, int]) -> str:
    """Return a name that no other node has."""
    if name not in taken:
        taken[name] = 0
        return name
    while True:
        taken[name] += 1
        other = f"{name} ~{taken[name]}"
        if other not in taken:
            taken[other] = 0
            return other
