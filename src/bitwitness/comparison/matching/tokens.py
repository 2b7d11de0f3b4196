"""By what a node of one run is known in the other: its operator, what made its inputs, its shapes, what it casts."""

from __future__ import annotations

from collections.abc import Mapping

from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.oracle.names import canonical

CASTS = ("_to_copy", "to", "type_as")
"""Operators that change a dtype."""
_OF_MAKERS = 0.9
"""What the same makers of all inputs weigh beside the same shape or the same arguments, which weigh 1."""


class Tokens:
    """What marks the nodes of one step.

    Parameters
    ----------
    frame
        The step.
    modules
        Module paths by what the other run calls them, where that is something else.

    """

    def __init__(self, frame: StepFrame, modules: Mapping[str, str]) -> None:
        self.frame = frame
        self._modules = modules
        self._by_number = {node.number: node for node in frame.nodes}
        self.matched: dict[int, int] = {}
        """The numbers of nodes that were matched already, with those of run A."""

    def op(self, node: Node) -> str:
        """Return the operator's name, whatever a framework or a release calls it."""
        if node.kind in ("module", "optimizer"):
            return node.kind  # known by its path; the class may have been replaced
        if node.kind == "gradient":  # one that was edited since the backward has two
            return f"{node.op}.{self.frame.text('slot', node.rows[0])}"
        return canonical(node.op) if node.kind in ("op", "collective") else node.op

    def word(self, node: Node) -> str:
        """Return what a node is aligned by: its operator and what it casts."""
        return self.op(node) + self.cast(node)

    def cast(self, node: Node) -> str:
        """Return which parameter or buffer an operator only casts, and how that is laid out: a transposed one is another.

        Empty if it is another operator, or casts what has no name. The name is the one in its module, which may be called
        otherwise in the other run.
        """
        if node.op not in CASTS or not node.inputs:
            return ""
        name, layout = (self.frame.text(column, node.inputs[0]) for column in ("name", "layout"))
        return f" of {name.rpartition('.')[2]} {layout}" if name else ""

    def likeness(self, node: Node, other: Node, others: Tokens) -> float | None:
        """Return how like two nodes of one operator are, from 0 to 2.9; None if only the operator is the same."""
        same_shape = self.shape(node) == others.shape(other)
        made, other_made = self.makers(node), others.makers(other)
        common = sum(x == y for x, y in zip(made, other_made, strict=False))
        most = max(len(made), len(other_made))
        if not same_shape and most and not common and (node.kind, node.phase) == ("op", "forward"):
            return None
        return same_shape + _OF_MAKERS * (common / most if most else 1.0) + (self.args(node) == others.args(other))

    def args(self, node: Node) -> str:
        """Return what an operator was called with beside its inputs, as it was recorded."""
        return self.frame.text("args", node.rows[0]) if node.kind == "op" else ""

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a node's first result."""
        return self.frame.shapes[node.outputs[0]] if node.outputs else ()

    def shapes(self, node: Node) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a node's inputs and results."""
        return tuple(self.frame.shapes[row] for row in (*node.inputs, *node.outputs))

    def makers(self, node: Node) -> list[str]:
        """Return the names of a node's inputs, or what made them: the very node where that was matched, or its operator."""
        return [self._maker(row) for row in node.inputs]

    def _maker(self, row: int) -> str:
        made = self._by_number.get(int(self.frame.producer[row]))
        if made is None:
            return self.frame.text("name", row)
        if made.number in self.matched:
            return f"#{self.matched[made.number]}"
        return f"{self._modules.get(made.module, made.module)}/{canonical(made.op)}"


def renamed(node: Node, modules: Mapping[str, str]) -> str:
    """Return a node's module by run B's name; of an update, whose place is its parameter, that of the parameter's module."""
    if node.kind != "optimizer" or node.module in modules:
        return modules.get(node.module, node.module)
    path, dot, name = node.module.rpartition(".")
    return f"{modules.get(path, path)}{dot}{name}" if dot else node.module


def may_be_one(a: StepFrame, x: Node, b: StepFrame, y: Node) -> bool:
    """Return whether two nodes in modules of other names may be one: not where a module's class or a size differs."""
    sizes = [[int(frame.count[row]) for row in node.outputs[:1]] for frame, node in ((a, x), (b, y))]
    return (x.kind != "module" or x.op == y.op) and sizes[0] == sizes[1]
