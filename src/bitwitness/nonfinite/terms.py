"""Terms of a loss that a replay does not compute again: made before the model's forward, or kept by a module as an attribute.

A taped call that reads such a tensor finds it as it was: the replay has its value, and not the gradient that goes back
through it. Autograd's graph still tells which operators made it, and of which parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bitwitness.capture.lossgraph import Outside, sources_in
from bitwitness.capture.step import StepRecord
from bitwitness.nonfinite.making import SLOPES
from bitwitness.tap.frames import NOWHERE, Line, line_text

_LONGEST = 2000  # nodes of autograd's graph that are walked for one term
_SHOWN = 4  # terms of one loss; the line is read in a terminal
_PLAIN = {op.removeprefix("_").replace("_", ""): op for op in SLOPES}


@dataclass(frozen=True, slots=True)
class Term:
    """A tensor with a past that the loss code read.

    Attributes
    ----------
    tensor
        The tensor.
    reader, line
        The taped call that read it, and the script's line of that call.
    nodes
        Autograd's names of what made it, the last operator first.
    parameters
        Names of the model's parameters that it was computed from.
    steep
        What made or read it and has an infinite slope somewhere: ``sqrt at zero``.

    """

    tensor: torch.Tensor
    reader: str
    line: Line
    nodes: tuple[str, ...]
    parameters: frozenset[str]
    steep: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return what it is, in words."""
        made = " of ".join(self.nodes[:_SHOWN]) + (" of …" if len(self.nodes) > _SHOWN else "")
        names = sorted(self.parameters)
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        source = f" from parameter {', '.join(names[:2])}{more}" if names else ""
        return f"it was made by {made}{source}, before the model's forward, inside it and kept as an attribute, or elsewhere"

    def read_by(self) -> str:
        """Return who read it, and where."""
        return f"{self.reader} at {line_text(self.line)}" if self.line[0] else self.reader


def terms_of(record: StepRecord, parameters: Mapping[str, torch.Tensor]) -> list[Term]:
    """Return the terms of a step's losses that a replay does not compute again."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[int, Term] = {}
    for tensor, reader, line in _read(record):
        if tensor.grad_fn is not None and id(tensor) not in found:
            nodes, leaves = _past(tensor.grad_fn)
            known = frozenset(names[leaf] for leaf in leaves if leaf in names)
            steep = tuple(dict.fromkeys(op for op in [reader, *map(_operator, nodes)] if op in SLOPES))
            shown = tuple(f"{op} {SLOPES[op]}" for op in steep)
            found[id(tensor)] = Term(tensor, reader, line, tuple(node.name() for node in nodes), known, shown)
    return list(found.values())


def _read(record: StepRecord) -> Iterator[tuple[torch.Tensor, str, Line]]:
    for graph in record.graphs.values():
        for call in graph.calls.values():
            for source in sources_in((call.args, call.kwargs)):
                if isinstance(source, Outside):
                    yield source.tensor, getattr(call.func, "__name__", "a call"), call.line
        for root in graph.roots:
            if isinstance(root, Outside):
                yield root.tensor, "backward", NOWHERE


def _operator(node: Any) -> str:
    """Return the operator of an autograd node whose slope may be infinite; empty for all others."""
    op = _PLAIN.get(node.name().rstrip("0123456789").removesuffix("Backward").lower(), "")
    exponent = getattr(node, "_saved_exponent", None) if op == "pow" else None
    return "" if isinstance(exponent, int | float) and exponent >= 1 else op


def _past(start: Any) -> tuple[list[Any], set[int]]:
    """Return the nodes behind a tensor, nearest first, and the ids of the leaves."""
    waiting, seen = [start], {start}
    nodes: list[Any] = []
    leaves: set[int] = set()
    while waiting and len(seen) < _LONGEST:
        node = waiting.pop(0)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            leaves.add(id(leaf))
            continue
        nodes.append(node)
        new = [following for following, _ in node.next_functions if following is not None and following not in seen]
        seen.update(new)
        waiting += new
    return nodes, leaves
