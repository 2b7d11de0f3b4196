"""Where a replayed pass goes back from: the script's loss code run again, or the gradients that arrived at the outputs.

Through the loss code is better: what it computes is repeated, too. A replay through it is believed only if autograd's
graph is then
the one that the training built. Without it, the outputs' gradients are enough where the loss reaches the parameters through
the outputs and by no other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bitwitness.capture.graphwalk import ForwardSpan, GraphSketch, sketch
from bitwitness.capture.lossgraph import Held, LossGraph, Output
from bitwitness.capture.step import Pass
from bitwitness.replay.errors import ReplayError
from bitwitness.replay.loss import LossRun
from bitwitness.tap.frames import line_text

Roots = list[tuple[torch.Tensor, torch.Tensor | None]]
CANNOT_RUN = "the loss code cannot be run again: {}"
NO_TAPE = "the code between the model's outputs and the backward was not seen"


@dataclass(slots=True)
class Starts:
    """What one pass goes back from: tensors, with their gradients.

    ``through``: the loss code was run again. ``proven``: what is repeated is all that led to the training's gradients.
    ``problem``:
    why the loss code was not run again, or what is not repeated.
    """

    roots: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    through: bool
    proven: bool
    problem: str | None = None
    made: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What the script's own calls made and it still holds, each with what the repeated call made."""


@dataclass(slots=True)
class Replayed:
    """What a pass's forwards gave in a replay.

    ``outputs``: the differentiable ones; ``spans``: the nodes of each forward; ``held``: what the forwards left in
    attributes, where
    the loss code reads it; ``leaves``: what stands for the parameters, by their ``id``; ``positions``: of these, by
    their ``id``.
    """

    outputs: dict[Output, torch.Tensor] = field(default_factory=dict)
    spans: list[ForwardSpan] = field(default_factory=list)
    held: dict[Held, torch.Tensor] = field(default_factory=dict)
    leaves: Mapping[int, torch.Tensor] = field(default_factory=dict)
    positions: Mapping[int, int] = field(default_factory=dict)
    run: LossRun | None = None
    """The loss code as far as it was run again; None where it cannot be."""
    problem: str | None = None

    def begin(self, graph: LossGraph | None, *, copies: bool) -> None:
        """Prepare to run the loss code, which may stand between the forwards, too; on ``copies`` of what it read, if so."""
        if graph is not None and graph.problem is None:
            self.run = LossRun(graph, self.outputs, self.leaves, self.held.__getitem__, copies=copies)

    def chained(self, graph: LossGraph | None, forward: int, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return a forward's inputs: where the training's had a history, what has that history in the replay."""
        chain = None if graph is None or self.run is None else graph.chains.get(forward)
        if chain is None or self.run is None:
            return given
        try:
            self.run.advance(chain.position)
            return [
                tensor if source is None else self.run.value(source)
                for tensor, source in zip(given, chain.inputs, strict=True)
            ]
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            self.run, self.problem = None, CANNOT_RUN.format(_told(error))
            return given

    def take_held(self, graph: LossGraph | None, forward: int, value: Callable[[Held], torch.Tensor | None]) -> None:
        """Keep what the forward that has just run left for the loss code."""
        for source in () if graph is None else graph.sources():
            if isinstance(source, Held) and source.forward == forward and (found := value(source)) is not None:
                self.held[source] = found


def starts_of(group: Pass, made: Replayed, *, strict: bool = True) -> Starts:
    """Return what a pass goes back from.

    Parameters
    ----------
    group, made
        The pass, and what its forwards gave now.
    strict
        Prefer what is proven over what goes through the loss code; a search for a NaN wants it the other way round.

    Raises
    ------
    ReplayError
        If there is nothing to go back from.

    """
    through, problem = _through_loss(group, made)
    if through is not None:
        proven = group.sketch is not None and _same_graph(group.sketch, through, made)
        problem = None if proven else _differs(group)
        if proven or not strict:
            starts = _starts(through, through=True, proven=proven, problem=problem)
            starts.made += [] if made.run is None else made.run.still_held()
            return starts
    if (found := _from_outputs(group, made, strict=True)) is not None:
        return _starts(found, through=False, proven=True, problem=problem or NO_TAPE)
    found = through or _from_outputs(group, made, strict=False)
    if found is None:
        raise ReplayError(problem or NO_TAPE)
    if problem is None or (group.sketch is not None and not group.sketch.only_outputs):
        problem = _differs(group)
    return _starts(found, through=through is not None, proven=False, problem=problem)


def _told(error: Exception) -> str:
    """Return an error in words: what this package says of a tape needs no name of a class before it."""
    return str(error) if type(error) is LookupError else f"{type(error).__name__}: {error}"


def _starts(pairs: Roots, *, through: bool, proven: bool, problem: str | None) -> Starts:
    return Starts([root for root, _ in pairs], [grad for _, grad in pairs], through, proven, problem)


def _through_loss(group: Pass, made: Replayed) -> tuple[Roots | None, str | None]:
    if made.run is None:
        return None, made.problem or (NO_TAPE if group.graph is None else group.graph.problem)
    try:
        return made.run.finish(), None
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        return None, CANNOT_RUN.format(_told(error))


def _same_graph(training: GraphSketch, roots: Roots, made: Replayed) -> bool:
    found = sketch([root for root, _ in roots], made.spans, made.positions)
    return training.complete and found.complete and found.shape == training.shape


def _differs(group: Pass) -> str:
    """Say which term of the loss a replay does not repeat, as far as it is known."""
    if group.sketch is None or not group.sketch.complete:
        return "the graph behind the loss is too large to be followed"
    terms = group.graph.unrepeated() if group.graph is not None else []
    if terms:
        name, line = terms[0]
        where = f", used at {line_text(line)}" if line[0] else ""
        return f"a term of the loss was computed elsewhere than in the model's forward or after it ({name}{where})"
    if group.sketch.inside:
        names = sorted({name for _, name in group.sketch.inside})
        return f"the loss reaches into the model's forward past its outputs ({', '.join(names[:3])})"
    return "the loss depends on the parameters by a way that a re-execution does not repeat"


def _from_outputs(group: Pass, made: Replayed, *, strict: bool) -> Roots | None:
    """Return outputs with the gradients that arrived there; None where these are not all that reached the parameters."""
    seen = group.sketch
    if strict and (seen is None or not seen.only_outputs or any(len(f.backwards) > 1 for f in group.forwards)):
        return None
    wanted = None if seen is None or not seen.complete else seen.outputs
    pairs = [
        (Output(forward.number, index), grad)
        for forward in group.forwards
        for index, grad in enumerate(forward.output_grads)
        if grad is not None and (wanted is None or Output(forward.number, index) in wanted)
    ]
    missed = wanted is not None and {output for output, _ in pairs} != wanted
    if not pairs or (strict and (missed or _nested([output for output, _ in pairs], made))):
        return None
    return [(made.outputs[output], grad) for output, grad in pairs]


def _nested(outputs: Sequence[Output], made: Replayed) -> bool:
    """Tell whether one of several outputs was computed from another: what arrived there came from both sides."""
    if len(outputs) < 2:
        return False
    keys = {(made.outputs[o].grad_fn, made.outputs[o].output_nr) for o in outputs}
    waiting = [edge for node, _ in keys if node is not None for edge in node.next_functions]
    seen = set()
    while waiting:
        edge = waiting.pop()
        if edge[0] is None or edge in seen:
            continue
        if edge in keys:
            return True
        seen.add(edge)
        waiting += edge[0].next_functions
    return False
