"""What a backward reaches: autograd's own graph, walked from its roots to the outputs of the forwards that were recorded.

A replay may speak only where it repeats every way by which a loss depends on the parameters. That is read off the graph
of the step itself, before its backward frees it: the walk stops at the outputs of recorded forwards (their insides are what a
replay runs again), and notes all else that it meets: parameters that are reached directly, and places inside a forward that are
reached past its outputs. The same walk over a replay's graph must give the same sketch.

Nodes are told apart by autograd's sequence numbers, so that nothing is kept alive. About a microsecond a node.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bitwitness.capture.lossgraph import Output

LARGEST = 20_000
"""Nodes outside the recorded forwards that are looked at: some 20 ms. A second network fits, an unrolled simulation
does not."""
Other = tuple[weakref.ref[nn.Parameter], int]
_Key = tuple[int, int, str]
_LEAF = (1 << 64) - 1  # the sequence number of every AccumulateGrad node
_SINK = "_DDPSinkBackward"  # DistributedDataParallel's own, around the outputs of static or unused graphs


@dataclass(slots=True)
class ForwardSpan:
    """The nodes that one forward of the root made.

    ``begin`` and ``end`` are autograd's sequence numbers before its first and after its last node; ``outputs`` maps
    (sequence number, output number, node's name) of each differentiable result to what it is called.
    """

    number: int
    begin: int
    end: int
    outputs: dict[_Key, Output] = field(default_factory=dict)
    inputs: list[tuple[Any, int]] = field(default_factory=list)
    """Edges of graph that led into the forward: what it was given had a history of its own."""

    def enter(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the inputs of the forward."""
        self.inputs = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors if tensor.grad_fn is not None]

    def add(self, tensor: torch.Tensor, index: int) -> None:
        """Note a differentiable result; one that another output shares keeps its first name."""
        node: Any = tensor.grad_fn
        if node is not None:
            # Sequence numbers are a thread's own; the name tells another thread's node apart.
            key = (node._sequence_nr(), tensor.output_nr, node.name())
            self.outputs.setdefault(key, Output(self.number, index))


@dataclass(frozen=True, slots=True)
class GraphSketch:
    """What lies between a backward's roots and the recorded forwards.

    Attributes
    ----------
    shape
        Hash of the structure: equal for two graphs of the same operators in the same order, over the same outputs and
        parameters.
    outputs
        The outputs at which the walk ended.
    parameters
        Positions of the root's parameters that are reached otherwise than through a recorded forward.
    inside
        Forwards (by number) entered past their outputs, each with the autograd node met there.
    nodes
        How many nodes were looked at.
    complete
        Whether the walk came to its end; else `LARGEST` nodes were seen.
    others
        Parameters that are not the root's and are reached, too, before its forwards or beside them; each with its version.

    """

    shape: int
    outputs: frozenset[Output]
    parameters: frozenset[int]
    inside: frozenset[tuple[int, str]]
    nodes: int
    complete: bool = True
    others: tuple[Other, ...] = field(default=(), compare=False)
    customs: tuple[type, ...] = field(default=(), compare=False)
    """Classes of `torch.autograd.Function` whose backwards lie there."""

    @property
    def forwards(self) -> frozenset[int]:
        """Numbers of the forwards that the backward goes through."""
        return frozenset(output.forward for output in self.outputs) | frozenset(number for number, _ in self.inside)

    @property
    def only_outputs(self) -> bool:
        """Whether the parameters are reached through the recorded forwards' outputs and by no other way."""
        return self.complete and not self.parameters and not self.inside


def sketch(roots: Iterable[Any], spans: Sequence[ForwardSpan], parameters: Mapping[int, int]) -> GraphSketch:
    """Walk from a backward's roots.

    Parameters
    ----------
    roots
        Tensors, or gradient edges.
    spans
        The recorded forwards.
    parameters
        Positions of the root's parameters, by ``id`` of what stands for them in the graph.

    """
    walk = _GraphWalk(spans, parameters)
    for root in roots:
        walk.waiting.append(_edge(root))
        walk.finish()
    return GraphSketch(
        hash(tuple(walk.tokens)),
        frozenset(walk.outputs),
        frozenset(walk.reached),
        frozenset(walk.inside),
        len(walk.numbers),
        walk.complete,
        tuple(walk.others.values()),
        tuple({type(node)._forward_cls for node in walk.numbers if hasattr(type(node), "_forward_cls")}),
    )


def _edge(root: Any) -> tuple[Any, int]:
    if not isinstance(root, torch.Tensor):
        return root[0], int(root[1])
    if root.grad_fn is not None:
        return root.grad_fn, root.output_nr
    return (torch.autograd.graph.get_gradient_edge(root).node, 0) if root.requires_grad else (None, 0)


class _GraphWalk:
    """One walk, depth first, in the order of the edges, so that equal graphs are seen in the same order."""

    def __init__(self, spans: Sequence[ForwardSpan], parameters: Mapping[int, int]) -> None:
        self._spans = spans
        self._ends = {key: output for span in spans for key, output in span.outputs.items()}
        self._inputs = {span.number: span.inputs for span in spans}
        self._parameters = parameters
        self.waiting: list[tuple[Any, int]] = []
        self.numbers: dict[Any, int] = {}
        self.tokens: list[object] = []
        self.outputs: set[Output] = set()
        self.reached: set[int] = set()
        self.inside: set[tuple[int, str]] = set()
        self.complete = True
        self.others: dict[int, Other] = {}
        self._elsewhere: set[tuple[Any, int]] = set()  # behind which nothing of the root lies
        self._met: dict[int, int] = {}

    def finish(self) -> None:
        while self.waiting and self.complete:
            node, number = self.waiting.pop()
            while node is not None and self._is_sink(node, number):
                node, number = node.next_functions[number]  # it hands each input on as the output of the same number
            self.tokens.append(self._meet(node, number))

    def _order(self, forward: int) -> int:
        """Return a forward's place in the order in which the walk came to them: the same in every step, and in replays."""
        return self._met.setdefault(forward, len(self._met))

    def _is_sink(self, node: Any, number: int) -> bool:
        name = node.name()
        return name == _SINK and (node._sequence_nr(), number, name) not in self._ends

    def _foreign(self, edge: tuple[Any, int]) -> bool:
        """Tell whether nothing of the root lies behind an input's history: a replay is given such an input without it."""
        waiting = [edge]
        seen: set[tuple[Any, int]] = set()
        others: dict[int, Other] = {}
        while waiting and len(seen) < LARGEST:
            node, number = waiting.pop()
            if node is None or (node, number) in seen or (node, number) in self._elsewhere:
                continue
            seen.add((node, number))
            sequence = node._sequence_nr()
            if sequence == _LEAF:
                leaf = getattr(node, "variable", None)
                if id(leaf) in self._parameters:
                    return False
                _note_other(leaf, others)
                continue
            if (sequence, number, node.name()) in self._ends or any(s.begin <= sequence < s.end for s in self._spans):
                return False
            waiting += node.next_functions
        if waiting:
            return False
        self.others |= others
        self._elsewhere |= seen
        return True

    def _meet(self, node: Any, number: int) -> object:
        """Note one node, and have those behind it visited; return what stands for it in the sketch."""
        if node is None:
            return None
        sequence = node._sequence_nr()
        if sequence == _LEAF:
            leaf = getattr(node, "variable", None)
            position = self._parameters.get(id(leaf))
            if position is not None:
                self.reached.add(position)
            else:
                _note_other(leaf, self.others)
            return ("leaf", position)
        name = node.name()
        output = self._ends.get((sequence, number, name))
        if output is not None:
            self.outputs.add(output)
            if output.forward not in self._met:
                self.waiting += reversed([e for e in self._inputs.get(output.forward, []) if not self._foreign(e)])
            return ("output", self._order(output.forward), output.index)
        if node in self.numbers:
            return self.numbers[node]
        for span in self._spans:
            if span.begin <= sequence < span.end:
                self.inside.add((span.number, name))
                return ("inside", self._order(span.number), name, sequence - span.begin)
        self.numbers[node] = len(self.numbers)
        self.complete = len(self.numbers) < LARGEST
        self.waiting += reversed(node.next_functions)
        return name


def _note_other(leaf: Any, others: dict[int, Other]) -> None:
    if isinstance(leaf, nn.Parameter):
        others[id(leaf)] = (weakref.ref(leaf), leaf._version)
