"""What one training does now: its forwards, backwards and steps, each told to those who take part in its session."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.errors import UsageError
from bitwitness.session.clock import StepClock
from bitwitness.session.count import StepCount
from bitwitness.session.instrument import Forward, Kind
from bitwitness.session.members import Members
from bitwitness.tap.compiled import find_entry, is_compiled
from bitwitness.tap.forwardhooks import ForwardHooks
from bitwitness.tap.modules import unwrap
from bitwitness.tap.moments import BackwardCall, StepListener, StepMoments
from bitwitness.tap.ownwork import in_replay
from bitwitness.tap.threads import TrainingThread


class Training(StepListener):
    """Hooks one model, counts its steps, and tells of its moments.

    Parameters
    ----------
    model
        What the training calls.
    members
        Who is told.

    Attributes
    ----------
    root
        The user's own module inside.
    entry
        Where the training enters the model.
    own_work
        Whether bitwitness itself runs the model now, so that nothing of it is the training's.

    """

    def __init__(self, model: nn.Module, members: Members) -> None:
        self.model = model
        self.root = unwrap(model)
        self.entry = find_entry(model, self.root)
        self.own_work = False
        self._members = members
        self._count = StepCount(self.root)
        self._thread = TrainingThread()
        self._open: list[tuple[Forward | None, ExitStack]] = []
        self._backwards: list[int | None] = []
        """The backwards that run: None, or its thread where that may be another model's, since no forward has run as yet."""
        self._hooks: ForwardHooks | None = None
        self._moments: StepMoments | None = None

    def _hear(self) -> None:
        """Hear of forwards and of what ends a step; of backwards, as long as anybody is awake."""
        if self._hooks is None:
            self._hooks = ForwardHooks(self.entry, self.root, self._forward_begins, self._forward_ended)
        backwards = bool(self._members.awake)
        if self._moments is None or self._moments.backwards != backwards:
            self._leave_moments()
            self._moments = StepMoments(self, backwards=backwards).__enter__()

    def _hear_nothing(self) -> None:
        """Leave the model and torch as they were found."""
        self._leave_moments()
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None

    def _leave_moments(self) -> None:
        if self._moments is not None:
            self._moments.__exit__(None, None, None)
            self._moments = None

    @property
    def step(self) -> int:
        """The number of the step that runs or, between two, of the one that ended last; set it to number the next."""
        return self._count.clock.step

    @step.setter
    def step(self, number: int) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise UsageError(f"session.step = {number!r}: expected the number of the step that comes next, 0 or more")
        self._count.clock.go_on_with(number)

    @property
    def clock(self) -> StepClock:
        """The count of steps."""
        return self._count.clock

    @property
    def forward_depth(self) -> int:
        """How many calls of the model are running, one inside the other."""
        return len(self._open)

    @property
    def in_forward(self) -> bool:
        """Whether the model runs now."""
        return bool(self._open)

    @property
    def backward_depth(self) -> int:
        """How many backwards are running, one inside the other, in the training's thread."""
        here = threading.get_ident()
        return sum(thread in (None, here) for thread in self._backwards)

    def owns(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer holds one of the model's parameters."""
        return self._count.owns(optimizer)

    @property
    def evaluated(self) -> bool:
        """Whether, since the last step ended, the model's only forwards with gradients were taken for evaluations."""
        return self._count.evaluated

    def trains(self) -> None:
        """Say that the model is trained, whatever runs first: forwards without gradients are evaluations."""
        self._count.trained()

    def follow_parameters(self) -> None:
        """Find out anew which optimizers are the model's: its parameters were replaced."""
        self._count.follow_parameters()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark what runs inside as bitwitness's own work on the model; no instrument is told of it, in whatever thread."""
        before, self.own_work = self.own_work, True
        try:
            yield
        finally:
            self.own_work = before

    # -- forwards ------------------------------------------------------------------------------------------------

    @property
    def _not_the_training(self) -> bool:
        """Whether bitwitness runs this model now, or a step of another one in which this may take part."""
        return self.own_work or in_replay()

    def join_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell of a call of ``module`` that has just begun, whose pre-hooks torch had already listed when ours was made."""
        if self._hooks is not None and not self._open:
            self._hooks.join(module, args, kwargs)

    def hook_parts(self, *, in_doubt: bool = False) -> None:
        """Tell of the outermost calls of the model's parts from now on, too: the script does not call the model itself.

        ``in_doubt``: only if it turns out so with the first call.
        """
        if self._hooks is not None and not any(map(is_compiled, self.root.modules())):
            self._hooks.hook_parts(in_doubt=in_doubt)

    def _forward_begins(self, part: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack = ExitStack()
        if self._not_the_training or self.backward_depth:  # a checkpoint around the whole model runs it again
            self._open.append((None, stack))
            return
        forward = Forward(part, args, kwargs, self._count.kind_of_forward())
        self._open.append((forward, stack))
        if forward.kind in (Kind.TRAINING, Kind.INFERENCE):
            self._thread.is_here()
        if self._count.forward_begins(forward.kind):
            self._tell("step_begins", self.step)
        self._members.enter(stack, "around_forward", forward)

    def begin_step(self) -> None:
        """Say that the training computes: a step begins, unless one is under way."""
        if self._count.begin_step():
            self._tell("step_begins", self.step)

    def _forward_ended(self, result: Any) -> None:
        if not self._open:
            return
        forward, stack = self._open.pop()
        if forward is not None:
            forward.result = result
            forward.raised = result is None and sys.exc_info()[0] is not None
        stack.close()

    # -- what `StepMoments` tells --------------------------------------------------------------------------------

    @contextmanager
    def around_backward(self, call: BackwardCall) -> Iterator[None]:
        """Run a backward inside all instruments."""
        if self._not_the_training or self._thread.is_another():
            yield
            return
        # A checkpoint's forward in a backward may run in a thread of autograd's own.
        thread = threading.get_ident() if self._thread.is_unknown() else None
        if not self.backward_depth:
            self._count.backward_begins(call)
        self._backwards.append(thread)
        try:
            with ExitStack() as stack:
                self._members.enter(stack, "around_backward", call)
                stack.callback(self._count_backward)
                yield
        finally:
            self._backwards.remove(thread)

    def _count_backward(self) -> None:
        """Count the outermost backward, before anybody looks at what it left: a step may have begun with it."""
        if self.backward_depth == 1 and self._count.backward_ended():
            self._tell("step_begins", self.step)
            self.hook_parts()

    def clipping(self, gradients: list[torch.Tensor]) -> None:
        """Tell that gradients are complete, if it is the model's that are about to be clipped."""
        if not self._thread.is_another() and self._count.are_ours(gradients):
            self.gradients_ready()

    def gradients_ready(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Tell that gradients are complete, and about to be used."""
        if self.own_work or self._is_anothers(optimizer):
            return
        if self._count.gradients_ready(scaler, optimizer):
            self._tell("step_begins", self.step)
        self._tell("gradients_ready", scaler=scaler, optimizer=optimizer)

    def closure_begins(self, optimizer: Optimizer) -> None:
        """Tell that an optimizer's step begins with a closure."""
        if self._is_anothers(optimizer):
            return
        self._count.closure_begins(optimizer)
        self._tell("closure_begins", optimizer)

    def closure_ended(self, optimizer: Optimizer) -> None:
        """Tell that the closure has completed the gradients."""
        if not self._is_anothers(optimizer):
            self._tell("closure_ended", optimizer)

    def zeroing(self, owner: Optimizer | nn.Module) -> None:
        """Tell that gradients are about to be zeroed."""
        self._tell("zeroing", owner)

    def zeroed(self, owner: Optimizer | nn.Module) -> None:
        """Tell that they were; the script may skip the step with that."""
        if self.own_work:
            return
        self._tell("zeroed", owner)
        if not self.backward_depth and self._count.zeroed(owner):
            self._tell("step_begins", self.step)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Count a step, and tell that parameters changed."""
        if self.own_work or self._is_anothers(optimizer):
            return
        self._count.optimizer_stepped(optimizer)
        self._tell("optimizer_stepped", optimizer)

    def scaler_updated(self, scaler: GradScaler) -> None:
        """Count a step, which the scaler may have skipped."""
        if self.own_work:
            return
        self._count.scaler_updated(scaler)
        self._tell("scaler_updated", scaler)

    def _is_anothers(self, optimizer: Optimizer | None) -> bool:
        """Tell whether an optimizer steps another model in another thread, which may be anywhere in its training."""
        return optimizer is not None and self._thread.is_another() and not self.owns(optimizer)

    def _tell(self, moment: str, *args: Any, **kwargs: Any) -> None:
        if not self.own_work:
            self._members.tell(moment, *args, **kwargs)
