"""What is kept of a step so that it can be run again: inputs, random state, autocast, held state, and each backward's start.

A replay runs the forwards again and then, where the script's loss code was taped, that code, and goes back from where the
training did. Where there is no tape it goes back from the gradients that arrived at the outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bitwitness.capture.ambient import Ambient
from bitwitness.capture.autocast import Autocast
from bitwitness.capture.contents import Snapshot
from bitwitness.capture.graphwalk import ForwardSpan, GraphSketch
from bitwitness.capture.lossgraph import LossGraph
from bitwitness.capture.memory import Memory
from bitwitness.capture.randomness import RandomState
from bitwitness.capture.structure import tensors_of
from bitwitness.capture.surroundings import Reading

_PENDING_KEPT = 8
"""Forwards in evaluation mode that wait for a backward. A model that is trained in that mode runs a few before each; an
evaluation that keeps gradients by mistake runs hundreds, and each holds its batch."""


@dataclass(slots=True)
class ForwardRecord:
    """One training forward of the root and, once its backward ran, the gradients that reached its outputs.

    ``args`` and ``kwargs`` hold clones of the input tensors. ``output_digests`` is one int64 0-d tensor for each differentiable
    output; ``output_grads`` stands parallel to it (None where no gradient arrived). ``backwards`` are the numbers of
    the backwards that went through this forward, ``number`` counts the step's forwards. ``state`` is what the module holds
    besides its parameters and buffers and is known to change; ``redirect`` stood in the root's own ``forward``
    attribute (Lightning
    sends the wrapper's call to ``training_step`` that way). ``communicates``: ranks exchanged something meanwhile.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    autocast: Autocast
    buffers: list[torch.Tensor]
    sync: bool
    left: torch.Tensor | None = None
    """Hashes of the buffers when it ended, where another forward of the step may follow."""
    untouched: torch.Tensor | bool | None = None
    """Whether it found the buffers as the forward before it in the step had left them: a bool, 0-d; None: not known."""
    versions: list[int] = field(default_factory=list)
    """The buffers' when it ended."""
    began: int | None = None
    """When it began, by `tap.timer.file_clock`; None for another rank's."""
    output_digests: list[torch.Tensor] = field(default_factory=list)
    output_grads: list[torch.Tensor | None] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    number: int = 0
    span: ForwardSpan | None = None
    state: Snapshot | None = None
    state_left: Snapshot | None = None
    """The same when it ended, until the step's next forward begins."""
    state_untouched: bool = False
    """Whether it found that as the forward before it in the step had left it."""
    redirect: Any = None
    communicates: bool = False
    ambient: Ambient | None = None
    surroundings: Reading | None = None
    """What the forward found around it; None for another rank's."""
    drawn: RandomState | None = None
    """The global generators when the forward ended; None for another rank's."""
    broadcast: bool = False
    """Whether DistributedDataParallel had made the buffers the same on all ranks before."""
    module: nn.Module | None = None
    """The part of the root that was called, where the root itself was not."""
    results: list[Memory | None] = field(default_factory=list)
    """Where each tensor that it returned lies (`structure.tensors_within`), as long as the script uses it."""

    @property
    def backpropagated(self) -> bool:
        """Whether a backward went through it."""
        return bool(self.backwards)


@dataclass(slots=True)
class Pass:
    """The forwards that one backward went through, and where it started.

    ``graph`` is what the script computed between the outputs and the backward's roots, ``sketch`` what the walk over
    autograd's graph found there. None: not known.
    """

    number: int
    forwards: list[ForwardRecord]
    graph: LossGraph | None = None
    sketch: GraphSketch | None = None

    @property
    def draws(self) -> bool:
        """Whether global generators moved during its forwards, or its loss code draws from them."""
        forwards = any(one.drawn is None or not one.random.equals(one.drawn) for one in self.forwards)
        return forwards or any(
            call.random is not None for call in (() if self.graph is None else self.graph.calls.values())
        )

    @property
    def began(self) -> int | None:
        """When its first forward did, by `tap.timer.file_clock`; None for another rank's."""
        return self.forwards[0].began

    @property
    def sync(self) -> bool:
        """Whether DistributedDataParallel reduces after it."""
        return self.forwards[-1].sync


@dataclass(slots=True)
class StepRecord:
    """All that is kept of one step.

    ``unreplayable`` names the reason where the step cannot be run again, ``unhealable`` why its gradients cannot be put
    right; ``began`` is when, by `tap.timer.stopwatch`. ``graphs``, ``sketches`` and ``roots`` (the tensors that it began at,
    as long as the script holds them) tell of each backward by its number.
    ``hooks`` stood on the parameters' gradients in its backwards; ``doubts`` are reasons that hold where a bool, 0-d, on
    its device, is true.
    ``parameters`` are the marks (`stats.marks_of`) of the parameters when it began, where they are kept; ``nbytes`` is what
    captures take so far.
    """

    step: int
    began: float = 0.0
    number: int = 0
    """How many records there were before; a step that is looked at more than once, as under LBFGS, has several."""
    looked_at: bool = False
    """Whether its gradients were complete, and read: what comes later belongs to another record."""
    forwards: list[ForwardRecord] = field(default_factory=list)
    start_norms: dict[int, torch.Tensor] = field(default_factory=dict)
    """Norms (0-d) of the gradients that lay there before the first backward, by the parameter's position."""
    left: frozenset[int] = frozenset()
    """Positions of those that an earlier step left there and no backward of this one has added to: none of this step's."""
    versions: list[int] = field(default_factory=list)
    hooks: list[tuple[Any, ...]] | None = None
    roots: dict[int, list[weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    doubts: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    training: list[bool] = field(default_factory=list)
    unreplayable: str | None = None
    unhealable: str | None = None
    graphs: dict[int, LossGraph] = field(default_factory=dict)
    sketches: dict[int, GraphSketch] = field(default_factory=dict)
    parameters: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    """The same marks, where sensors want them; with other ranks to ask they are no evidence of a change."""
    nbytes: int = 0
    partners: set[int] = field(default_factory=set)
    """Ranks of the job with which this one exchanged something inside the forwards."""

    cleared: bool = False
    """Whether gradients of an earlier backward of the step were zeroed, and the forwards behind them forgotten."""

    reduced: bool = False
    """Whether one of its backwards has had its gradients reduced over the ranks."""

    @property
    def zero_start(self) -> bool:
        """Whether gradients were added to what was there; a replay is told only of zeros, which turn -0.0 into +0.0."""
        return not self.start_norms.keys() <= self.left

    @property
    def start_norm(self) -> torch.Tensor | None:
        """The sum of the norms of what gradients were added to; None where nothing was there."""
        norms = [norm for index, norm in self.start_norms.items() if index not in self.left]
        return torch.stack(norms).sum() if norms else None

    def give_up(self, reason: str) -> None:
        """Say why this step cannot be run again; the first reason stands."""
        if self.unreplayable is None:
            self.unreplayable = reason

    @property
    def backpropagated(self) -> bool:
        """Whether any of its forwards was."""
        return any(forward.backwards for forward in self.forwards)

    def let_go_of_evaluations(self) -> None:
        """Keep few forwards in evaluation mode that wait for a backward: some evaluations keep gradients by mistake."""
        pending = [forward for forward in self.forwards if not forward.backpropagated]
        if len(pending) > _PENDING_KEPT:
            self.forwards = [forward for forward in self.forwards if forward is not pending[0]]

    def passes(self) -> list[Pass]:
        """Group the forwards by the backwards that went through them, in order; unused forwards are left out.

        One whose outputs the loss only reads (a target, detached) is used.
        """
        return [self._pass(number) for number in sorted({n for forward in self.forwards for n in forward.backwards})]

    def _pass(self, number: int) -> Pass:
        graph = self.graphs.get(number)
        read = set() if graph is None else graph.forwards
        forwards = [forward for forward in self.forwards if number in forward.backwards or forward.number in read]
        return Pass(number, forwards, graph, self.sketches.get(number))

    def others(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters of other models that its backwards reached, too: those as they were, those stepped since."""
        seen = [other for sketch in self.sketches.values() for other in sketch.others]
        found = {id(p): (p, version) for ref, version in seen if (p := ref()) is not None}.values()
        return [p for p, version in found if p._version == version], [
            p for p, version in found if p._version != version
        ]

    @property
    def shape(self) -> int:
        """Hash of what lies between this step's losses and its forwards: equal for steps of the same structure."""
        return hash(tuple((len(p.forwards), p.sketch and p.sketch.shape) for p in self.passes()))

    @property
    def communicates(self) -> bool:
        """Whether ranks exchanged something inside its forwards."""
        return any(forward.communicates for forward in self.forwards)

    def value_dependent(self) -> list[bool]:
        """Tell, for each output hash of the passes in order, whether the gradient it got depends on its value.

        The gradient of a scalar (a loss) is a constant; that of anything else was computed from it outside the root.
        """
        return [
            grad is not None and grad.numel() > 1
            for group in self.passes()
            for record in group.forwards
            for grad in record.output_grads
        ]


def beside(passes: Sequence[Pass]) -> list[Any]:
    """Return what of the script's ran with some passes beside the modules' code: modes, hooks, autograd functions, tensors."""
    found: list[Any] = []
    for group in passes:
        found += () if group.sketch is None else group.sketch.customs
        for forward in group.forwards:
            found += {type(tensor) for tensor in tensors_of((forward.args, forward.kwargs))}
            if forward.ambient is not None:
                found += [*forward.ambient.modes, *forward.ambient.dispatch, *(forward.ambient.saving or ())]
    return found
