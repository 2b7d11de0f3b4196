"""When the loss tape runs: from the end of the root's forward to the backward that reaches it, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from bitwitness.capture.lossgraph import LossGraph
from bitwitness.capture.losstape import LossTape
from bitwitness.capture.step import StepRecord
from bitwitness.capture.tapedcalls import FindHeld
from bitwitness.capture.unused import UnusedLosses
from bitwitness.tap.moments import BackwardCall

Dropped = Callable[[LossGraph], None]


class LossWindow:
    """Opens and closes the tape of one root.

    Parameters
    ----------
    device
        The root's.
    allowed
        Asked before the tape runs: compiled code in the window would be compiled anew for its sake.
    find, is_inside
        Where the root holds a tensor that a forward made, and whether one did (`capture.tapedcalls`).

    """

    def __init__(
        self,
        device: torch.device,
        *,
        allowed: Callable[[], bool],
        find: FindHeld = lambda _: None,
        is_inside: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> None:
        self._make = partial(LossTape, device, find, is_inside)
        self._tape: LossTape | None = None
        self._allowed = allowed
        self._dropped: Dropped | None = None
        self.unused = UnusedLosses()
        self._reopen = False
        self._retained = False

    def use(self, *, taped: bool, dropped: Dropped | None) -> None:
        """Note what the script calls, if asked; tell ``dropped`` of a loss that is not finite and was not backpropagated."""
        self._dropped = dropped
        if taped and self._tape is None:
            self._tape = self._make()

    @property
    def own_seconds(self) -> float:
        """Seconds that noting took so far."""
        return 0.0 if self._tape is None else self._tape.own_seconds

    def give_up(self, problem: str) -> None:
        """Say why the step's loss code cannot be run again."""
        if self._tape is not None:
            self._tape.give_up(problem)

    def new_step(self) -> None:
        """Forget the step before."""
        if self._tape is not None:
            self._tape.new_step()

    def add_output(self, tensor: torch.Tensor, forward: int, index: int) -> None:
        """Say that a tensor is an output of the root (`lossgraph.Output`)."""
        if self._tape is not None:
            self._tape.add_output(tensor, forward, index)

    def note_forward(self, number: int, inputs: Sequence[torch.Tensor]) -> bool:
        """Say what a forward of the root is given; return whether all that comes from earlier ones can be computed again."""
        return self._tape is None or self._tape.note_forward(number, inputs)

    def forward_begins(self) -> None:
        """Close, for as long as the root runs."""
        if self._tape is not None:
            self._reopen = self._tape.on
            self._tape.end()

    def forward_ended(self, *, recorded: bool) -> None:
        """Open after a forward that is recorded, or if the window was open before it."""
        self._begin(wanted=recorded or self._reopen)

    def backward_begins(self, call: BackwardCall, record: StepRecord, number: int) -> None:
        """Keep what the backward starts from, and close."""
        if self._tape is None:
            return
        self._reopen, self._retained = self._tape.on, call.retains
        if self._reopen and call.accumulates:
            record.graphs[number] = graph = self._tape.graph(call.roots, call.grads)
            if graph.problem is None:
                graph.keep_outside()
        self._tape.end()

    def backward_ended(self, *, reached: bool) -> None:
        """Open again after a backward of something else, or one after which another may come."""
        if not reached or self._retained:
            self._begin(wanted=self._reopen)

    def close(self) -> None:
        """Note no more of what the script calls, for now."""
        if self._tape is not None:
            self._tape.end()

    def forget(self) -> None:
        """Let go of what was noted: the step is over."""
        self.unused.step_ended()
        self.close()
        self.new_step()

    def open_loss(self, record: StepRecord) -> LossGraph | None:
        """Return the last number (else output) that the script has, and whose backward has not come; None if there is none."""
        if self._tape is None or all(forward.backpropagated for forward in record.forwards):
            return None
        return self._tape.last_computed()

    def open_output(self, record: StepRecord) -> float | None:
        """Return a value that is not finite of an output whose backward has not come; None if there is none.

        Waits for the device.
        """
        if self._tape is None or not record.forwards or record.forwards[-1].backpropagated:
            return None
        bad = [values[~values.isfinite()] for values in map(torch.Tensor.detach, self._tape.last_outputs())]
        return next((float(found[0]) for found in bad if found.numel()), None)

    def mind_dropped_loss(self, record: StepRecord) -> None:
        """Tell of a loss that the script computed and did not use, if it is not finite; its forwards count no more.

        Where nobody is to be told, it is kept until somebody asks.
        """
        forwards = record.forwards
        last = None if self._tape is None else self._tape.last_scalar
        if last is None or not forwards or forwards[-1].backpropagated:
            return
        if self._dropped is None:
            self.unused.may_be(record.step, last, forwards[-1])
            return
        graph = self.open_loss(record)
        if graph is not None and not bool(last.isfinite().all()):
            self._dropped(graph)
            record.forwards = [forward for forward in forwards if forward.backpropagated]

    def _begin(self, *, wanted: bool) -> None:
        if wanted and self._tape is not None and self._allowed():
            self._tape.begin()
