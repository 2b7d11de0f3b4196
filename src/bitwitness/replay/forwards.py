"""A step's forwards run again, each from what the training's own found: inputs, buffers, held state, random states, modes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch import nn

from bitwitness.capture.buffers import BufferKeeper
from bitwitness.capture.contents import Place
from bitwitness.capture.graphwalk import ForwardSpan
from bitwitness.capture.heldstate import HeldState
from bitwitness.capture.lossgraph import Output
from bitwitness.capture.memory import Memory, still_used
from bitwitness.capture.randomness import RandomState, left_alone
from bitwitness.capture.reasons import DISPATCHING
from bitwitness.capture.step import ForwardRecord, Pass
from bitwitness.capture.structure import differentiable, fresh, map_tensors, tensors_of, tensors_within
from bitwitness.replay.errors import ReplayError
from bitwitness.replay.execution import Around
from bitwitness.replay.quiet import quiet, redirected
from bitwitness.replay.start import Replayed
from bitwitness.replay.untouched import Untouched
from bitwitness.stats import bit_hash
from bitwitness.tap.compat import sequence_number
from bitwitness.tap.compiled import EntryPoint
from bitwitness.tap.modes import scripts_modes_back
from bitwitness.tap.ownwork import own_work


class ForwardReplay:
    """Runs the captured forwards of one root again.

    Parameters
    ----------
    root, entry
        The user's module, and how the training runs it.
    held, keeper
        Know the root's other state, and its buffers.
    untouched
        Told of what makes a result no evidence.

    """

    def __init__(
        self,
        root: nn.Module,
        device: torch.device,
        *,
        entry: EntryPoint,
        held: HeldState,
        keeper: BufferKeeper,
        untouched: Untouched,
    ) -> None:
        self._root = root
        self._device = device
        self._entry = entry
        self._held = held
        self._keeper = keeper
        self._untouched = untouched
        self._latest = -1
        self.strict = True
        """Whether a result counts only where all that led to the training's is repeated."""
        self.alone = True
        """Whether this rank may leave a replay early; the others do not wait for it."""
        self.other_way = False
        """Whether a forward of this execution made more or fewer nodes of autograd's than the training's own did."""
        self.results: list[tuple[Memory, torch.Tensor]] | None = None
        """What the forwards returned where the script still uses the memory of the training's own; None to keep none."""

        self.changes: set[Place] | None = None
        """The places of the state that this execution changes; None where nobody asked."""

    def noting(self) -> AbstractContextManager[None]:
        """Return a context for code of the step's: what it changes is noted, where that was asked for."""
        return self._held.noting(self.changes)

    def begin(self) -> None:
        """Say that an execution begins: its first forward starts from the buffers that the training's own found."""
        self._latest = -1
        self.other_way = False

    def run(
        self,
        group: Pass,
        hashes: list[torch.Tensor],
        around: Around,
        *,
        parameters: Iterable[torch.Tensor],
        leaves: dict[int, torch.Tensor],
        call: Any = None,
    ) -> Replayed:
        """Run one pass's forwards, in order; the bit hashes of their outputs are added to ``hashes``.

        ``parameters`` stand for the root's, in order: they, or the ``leaves`` put in their places, by the parameters' ``id``.
        ``call`` is run in the root's place, its wrapper perhaps.
        """
        made = Replayed(leaves=leaves, positions={id(leaf): i for i, leaf in enumerate(parameters)})
        made.begin(group.graph, copies=self.strict)
        for record in group.forwards:
            given = [fresh(tensor) for tensor in tensors_of((record.args, record.kwargs))]
            with around():
                given = made.chained(group.graph, record.number, given)
            begin = sequence_number()
            values = self._forward(record, given, hashes, around, call)
            span = ForwardSpan(record.number, begin, sequence_number())
            if record.span is not None and span.end - span.begin != record.span.end - record.span.begin:
                self.other_way = True
            span.enter(given)
            for index, position in enumerate(differentiable(values)):
                span.add(values[position], index)
                made.outputs[Output(record.number, index)] = values[position]
            made.outputs |= {Output(record.number, -1 - position): value for position, value in enumerate(values)}
            made.spans.append(span)
            made.take_held(group.graph, record.number, lambda source: self._held.value(source.path))
        return made

    def _forward(
        self,
        record: ForwardRecord,
        given: list[torch.Tensor],
        hashes: list[torch.Tensor],
        around: Around,
        call: Any = None,
    ) -> list[torch.Tensor]:
        follows = self._latest == record.number - 1
        if not follows or record.untouched is None or not bool(record.untouched):
            self._keeper.put(record.buffers)  # else they are what the replay of the forward before made of them
        self._latest = record.number
        follows &= record.state_untouched
        if record.state is not None and not follows:
            record.state.restore()  # likewise
        record.random.restore(self._device)
        inputs = iter(given)
        args = map_tensors(record.args, lambda _: next(inputs))
        kwargs = map_tensors(record.kwargs, lambda _: next(inputs))
        ambient = nullcontext() if record.ambient is None else record.ambient.restored()
        call = call if record.module is None else record.module
        if call is None:  # a module may have a length, and that may be 0
            call = self._entry.call if around is nullcontext else self._root
        with self.noting(), ambient, record.autocast.context(), around(), redirected(self._root, record.redirect):
            if around is nullcontext:
                self._compare_surroundings(record, follows=follows)
            with quiet(self._root, since=record.began), scripts_modes_back():
                result = copy_context().run(
                    call, *args, **kwargs
                )  # what it sets in context variables is gone with the copy
        if (
            around is nullcontext
            and record.drawn is not None
            and not left_alone()
            and not record.drawn.equals(RandomState.read(self._device))
        ):
            self._untouched.problem = (
                "a re-execution draws other random numbers than the forward did (a cache, perhaps)"
            )
        values = tensors_within(result)
        if self.results is not None:
            self.results += still_used(record.results, values)
        made, wanted = differentiable(values), len(record.output_grads)
        if len(made) != wanted:
            raise ReplayError(f"the replayed forward returned {len(made)} differentiable outputs, the step {wanted}")
        with own_work(), torch.no_grad():
            hashes += [bit_hash(values[position].detach()) for position in made]
        return values

    def _compare_surroundings(self, record: ForwardRecord, *, follows: bool) -> None:
        """See whether a forward that is about to be repeated finds what the training's found.

        ``follows``: but for what the replay of the forward before has made of the state.
        """
        with own_work(), torch.no_grad():
            around = record.surroundings
            moved = None if around is None else self._held.moved(around, but_state=follows)
        if moved is not None:
            self._untouched.problem = f"the forward found {moved} otherwise than a re-execution does"
        if record.ambient is not None and (mode := record.ambient.dispatching()) is not None:
            self._untouched.problem = DISPATCHING.format(mode=mode)
        if self._untouched.problem is not None and self.strict and self.alone:
            raise ReplayError(self._untouched.problem)  # before it changes anything for nothing
