"""Each step of one root, captured as it runs and read when its gradients are complete.

When they are complete is told by the first that is about to use them: a clipping function, a gradient scaler, an optimizer's
step (the pre-optimizer point). What is read reaches the host there: the one wait of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.capture.edits import BY_HAND, Edits
from bitwitness.capture.gradients import LocalGradients
from bitwitness.capture.looks import ModuleLooks
from bitwitness.capture.lossgraph import LossGraph
from bitwitness.capture.root import RootTap
from bitwitness.capture.step import ForwardRecord, StepRecord
from bitwitness.capture.training import Wants
from bitwitness.ranks import Ranks
from bitwitness.session.gradients import StepGradients
from bitwitness.session.instrument import Forward, Instrument, Kind
from bitwitness.session.judging import CompleteStep
from bitwitness.session.session import Session
from bitwitness.tap.modes import scripts_modes_off
from bitwitness.tap.moments import BackwardCall
from bitwitness.tap.optimizerhooks import in_step
from bitwitness.tap.owners import Owners
from bitwitness.tap.timer import Timer
from bitwitness.tap.traffic import strangers

IN_BACKWARD = "an optimizer runs inside the backward"
PAUSED = "the guard was paused in them"
CUT = "another judge of steps came in the middle of them"


class StepCapture(Instrument):
    """Captures the steps of one session's model.

    Parameters
    ----------
    session
        Whose steps these are.
    ranks
        Those that train the model together.
    wants
        What is needed of each step.
    optimizers
        Those before whose steps gradients are read; None for all that hold one of the parameters.

    """

    def __init__(self, session: Session, ranks: Ranks, wants: Wants, optimizers: list[Optimizer] | None = None) -> None:
        self.session = session
        self.ranks = ranks
        self.wants = wants
        self.optimizer_steps = 0
        self.limits: Counter[str] = Counter()
        """Why steps could not be run again, or not be healed, and how many."""
        self.refusals: Counter[str] = Counter()
        """The same of what was found only when a step was to be run again: of the others it is not known."""
        self.unrepeated_losses: Counter[str] = Counter()
        """Why loss code outside the model could not be run again, and in how many steps."""
        self._optimizers = optimizers
        self.root = RootTap(
            session,
            wants,
            alone=ranks.size == 1,
            local_gradients=self._collect,
            fail=self.fail,
            dropped=self._loss_dropped,
            retrained=self._parameters_changed,
        )
        self._timed = Timer(self.root.now)
        self.looks: ModuleLooks | None = None
        self._read_anew()
        self._complete = False
        self._forwards_read = 0
        session.trains()

    def _read_anew(self) -> None:
        """Read the parameters that ask for gradients now, as far as is wanted."""
        parameters = list(self.root.parameters.values())
        if self.wants.looks and self.looks is None:
            self.looks = ModuleLooks(self.root.root, self.root.now)
        self._owners = Owners(parameters, self._optimizers)
        self._step = StepGradients(self.root, self.ranks.rank, looks=self.looks, norms_only=not self.wants.hashed)

    @property
    def gradients(self) -> LocalGradients:
        """What describes the gradients."""
        return self._step.local

    @property
    def edits(self) -> Edits:
        """What sees whether the script has changed them."""
        return self._step.edits

    # -- what is done with them ----------------------------------------------------------------------------------

    def _read(self, scaler: GradScaler | None, *, unused: bool = False) -> None:
        """Read the step, once after each of its backwards; ``unused``: the script lets go of the gradients."""
        raise NotImplementedError

    def _parameters_changed(self) -> None:
        raise NotImplementedError

    def _loss_dropped(self, graph: LossGraph) -> None:
        raise NotImplementedError

    def fail(self, part: str, error: Exception) -> None:
        """Say an error of our own once; the step is given up, the training goes on."""
        raise NotImplementedError

    def removed(self) -> None:
        """Remove every hook."""
        self.gradients.close()
        if self.looks is not None:
            self.looks.close()
        self.root.close()

    def forked(self) -> None:
        """Remove them in a child, too."""
        self.removed()

    def paused(self) -> None:
        """Record nothing until `resumed`."""
        self.root.paused = True
        self.root.window.close()
        self._cut()

    def resumed(self) -> None:
        """Record again, from the next forward on."""
        self.root.paused = False
        self._cut()

    def _cut(self) -> None:
        if self.session.clock.begun:
            self.root.record.give_up(PAUSED)

    # -- moments -------------------------------------------------------------------------------------------------

    @contextmanager
    def around_forward(self, forward: Forward) -> Iterator[None]:
        """Record a training forward; the loss code pauses for any."""
        outermost, record = self.session.forward_depth == 1, None
        if outermost:
            self.root.forward_begins()
        if forward.kind is Kind.TRAINING:
            with self._safely("capture"):
                record = self.root.begin(forward.part, forward.args, forward.kwargs)
                self._look(record)
        yield
        if self.looks is not None and outermost:
            with self._safely("looks at modules"), self._timed():
                self.looks.forward_ended()
        if record is not None and not forward.raised:
            with self._safely("capture"):
                self.root.end(record, forward.result)
        if outermost:
            self.root.forward_ended(recorded=record is not None)

    def _look(self, record: ForwardRecord | None) -> None:
        """Look at the results of the modules that a training forward runs; not inside compiled code."""
        if self.looks is not None and record is not None and not self.root.regions.present():
            with self._timed():
                self.looks.forward_begins()

    @contextmanager
    def around_backward(self, call: BackwardCall) -> Iterator[None]:
        """Record a backward; one inside another is activation checkpointing of the reentrant kind, and part of it."""
        if self.session.backward_depth > 1:
            yield
            return
        with self._safely("backward"), scripts_modes_off():
            self.root.begin_backward(call)
            self.gradients.begin_backward(reducing=self.root.reducing, first=self.root.first)
        try:
            yield
        finally:
            with scripts_modes_off():
                self._backward_ended(call)

    def _backward_ended(self, call: BackwardCall) -> None:
        if not self.root.end_backward():
            return
        self._complete = True
        self._step.losses += [t.detach() for t in call.roots if isinstance(t, torch.Tensor) and t.numel() == 1]
        with self._safely("local gradients"), self._timed():
            self._step.edits.backward_ended()
            if self.looks is not None:
                self.looks.fold()
        if self._step.early:
            self._read(None)

    def gradients_ready(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Read the step's gradients, and have them judged."""
        if self._complete:
            self.root.window.close()
        if optimizer is not None and not self._owners.ours(optimizer):
            return
        in_backward = self.session.backward_depth > 0
        if optimizer is None and (self.gradients.unreduced or in_backward):
            return  # gradients are clipped that one rank alone may have made, to look at them
        if optimizer is not None and in_backward:
            self._stepping_early(optimizer)
            return
        if optimizer is not None and not self._complete and self._gradients_by_hand():
            self.root.record.give_up(BY_HAND)
            self._complete = True
        self._read(scaler)

    def closure_ended(self, optimizer: Optimizer) -> None:
        """Read the gradients that a closure has completed, each time that it is called."""
        self.gradients_ready(optimizer=optimizer)

    def _gradients_by_hand(self) -> bool:
        """Tell whether the model was run since the last look, and has gradients that no backward put there."""
        ran = self.root.forwards_seen > self._forwards_read
        return (ran or not self.root.forwards_seen) and any(p.grad is not None for p in self.root.parameters.values())

    def _stepping_early(self, optimizer: Optimizer) -> None:
        """Describe what an optimizer that runs inside the backward is about to use."""
        self.root.record.give_up(IN_BACKWARD)
        with self._safely("local gradients"):
            self._step.collect_early(p for group in optimizer.param_groups for p in group["params"])

    def zeroing(self, owner: Optimizer | nn.Module) -> None:
        """Read gradients that are about to be zeroed unused, where these are wanted: scripts skip a bad step by themselves.

        Only alone: other ranks may not skip.
        """
        if not self._complete or self.session.backward_depth or not self._owners.covers(owner):
            return
        if self.wants.unused and self.ranks.size == 1:
            self._read(None, unused=True)
        elif not in_step():  # of a closure that was called before this reader was made
            self.root.window.unused.add(self.session.step, self._step.losses)

    def leave_open(self) -> None:
        """Keep the losses of a step that the training began and will not end."""
        self.root.window.mind_dropped_loss(self.root.record)
        if self._complete:
            self.root.window.unused.add(self.session.step, self._step.losses)

    def zeroed(self, owner: Optimizer | nn.Module) -> None:
        """Forget what was backpropagated into gradients that are zero now."""
        if self.session.backward_depth or not self._owners.covers(owner):
            return
        self._complete, self._step.losses = False, []
        self._step.edits.cleared()
        self.root.gradients_cleared()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Note that parameters changed."""
        if self._owners.ours(optimizer):
            self._complete, self._step.losses = False, []  # of a closure that had begun before this reader was made
            self.optimizer_steps += 1

    def steps_for(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer's steps are among those before which gradients are read."""
        return self._owners.ours(optimizer)

    @property
    def unseen(self) -> bool:
        """Whether optimizers step, and nothing was seen of how their gradients came about."""
        return bool(self.optimizer_steps) and not self.root.forwards_seen and not self.root.unseen_backwards

    @property
    def own_seconds(self) -> float:
        """Seconds that bitwitness attributes to itself so far, by `tap.timer.stopwatch`."""
        looks = 0.0 if self.looks is None else self.looks.seconds
        return self._timed.seconds + self.root.own_seconds + looks

    def _complete_step(self, record: StepRecord, scaler: GradScaler | None) -> CompleteStep:
        features = self._step.take()
        if not self._step.early:
            self._step.edits.look(record)
        if (problem := strangers(record.partners, self.ranks.members)) is not None:
            record.give_up(problem)
        self.unrepeated_losses.update({p.graph.problem for p in record.passes() if p.graph and p.graph.problem})
        light = None if features is None else self._step.light(features, scaler)
        return CompleteStep(record, features, light, self._step.early)

    def _collect(self) -> None:
        with self._timed():
            self._step.collect()

    @contextmanager
    def _safely(self, part: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.fail(part, error)
