"""Which step runs: told by what the training does, and counted once for all who watch it."""

from __future__ import annotations

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.capture.ledger import GradientLedger
from bitwitness.session.byhand import StepsByHand
from bitwitness.session.clock import StepClock, TrainingForwards
from bitwitness.session.instrument import Kind
from bitwitness.tap.compat import in_transform
from bitwitness.tap.moments import BackwardCall
from bitwitness.tap.owners import Owners, optimizers_of


class StepCount:
    """Counts one model's steps.

    Parameters
    ----------
    root
        The user's own module.

    Attributes
    ----------
    clock
        The count.
    forwards
        Training forwards so far.

    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.clock = StepClock()
        self.forwards = 0
        self._training = TrainingForwards(root)
        self._asked = False
        self._backpropagated = False
        self._accumulated = False  # by a backward into ``p.grad``; of a penalty's gradient a loss is made yet
        self._accumulates = False
        self._looked_at = False
        self._followed = False  # by a forward, after its gradients were looked at
        self._in_closures = False
        self.evaluated = False
        """Whether, since the last step ended, the only forwards with gradients were taken for evaluations."""
        self._backpropagated_evaluation = False
        self._transformed = (
            False  # the forwards since the last step: a script sets gradients of ``torch.func.grad`` by itself
        )
        self._retained = False  # a graph of the forwards that were told, for more backwards
        self._between = False  # two steps, when the backward began that runs
        self._scalers: list[GradScaler] = []
        self._by_hand = StepsByHand(root)
        self.follow_parameters()

    def follow_parameters(self) -> None:
        """Find out anew whose steps count: the model's parameters were replaced."""
        self.parameters = list(self._root.parameters())
        self.owners = Owners(self.parameters, None)
        self._ledger = GradientLedger(self.parameters)

    def owns(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer holds one of the model's parameters; of one seen first, those that it has by now."""
        known = self.owners.knows(optimizer) or self.owners.ours(optimizer)
        if not known and Owners(self._root.parameters(), None).ours(optimizer):  # adapters, say, that came late
            self.follow_parameters()
        return self.owners.ours(optimizer)

    def trained(self) -> None:
        """Take the model for one that is trained: forwards without gradients are evaluations."""
        self._training.inferring = False

    # -- what a forward is for -----------------------------------------------------------------------------------

    def kind_of_forward(self) -> Kind:
        """Tell what the forward that begins now is for."""
        if in_transform():
            self._transformed = True
            return Kind.TRANSFORMED
        if self._training.inferring and not torch.is_grad_enabled() and not self._asked:
            self._asked = True
            if optimizers_of(self._root):  # a trainer's check before the first step, say
                self.trained()
        if self._training.evaluates():
            self.evaluated |= torch.is_grad_enabled() and not self.clock.begun
            return Kind.EVALUATION
        return Kind.TRAINING if torch.is_grad_enabled() else Kind.INFERENCE

    def forward_begins(self, kind: Kind) -> bool:
        """Count a forward; return whether it is the first of a step."""
        if kind not in (Kind.TRAINING, Kind.INFERENCE):
            return False
        self.forwards += kind is Kind.TRAINING
        self.evaluated = self._backpropagated_evaluation = self._retained = False
        self._followed |= self._looked_at
        if kind is Kind.INFERENCE and self.clock.begun:
            self.clock.end_step()
        if self._backpropagated and self.clock.begun and (self._is_frozen() or self._by_hand.stepped()):
            self._end()
        self._backpropagated = False
        self.clock.micro += self._accumulated
        self._accumulated = False
        return self.begin_step()

    def _is_frozen(self) -> bool:
        """Tell whether nothing in the model is trained, so that no optimizer ends its steps: the next forward does."""
        return not any(parameter.requires_grad for parameter in self._root.parameters())

    def begin_step(self) -> bool:
        """Say that the training computes; return whether a step begins with that."""
        first = self.clock.begin_forward()
        if first:
            self._transformed = False
            self._backpropagated = self._accumulated = self._looked_at = self._followed = False
            self._by_hand.step_begins()
        return first

    def backward_begins(self, call: BackwardCall) -> None:
        """Note the gradients before a backward between two steps: it may come of parts that the script calls by themselves."""
        seen = self.clock.begun or self.evaluated or self._retained
        self._between = self.forwards > 0 and call.accumulates and not seen
        if self._between:
            self._ledger.open()
        self._retained |= call.retains
        self._accumulates = call.accumulates

    def backward_ended(self) -> bool:
        """Count a backward; return whether a step begins with it: of a model whose parts are called, nothing else tells."""
        self._backpropagated = True
        self._accumulated |= self._accumulates
        self._backpropagated_evaluation = self.evaluated
        unseen = (self._accumulates and not self.forwards) or (self._between and self._ledger.moved())
        self._between = False
        return unseen and self.begin_step()

    # -- what ends a step ----------------------------------------------------------------------------------------

    def are_ours(self, gradients: list[torch.Tensor]) -> bool:
        """Tell whether some gradients are the model's."""
        given = set(map(id, gradients))
        return any(id(parameter.grad) in given for parameter in self.parameters)

    def gradients_ready(self, scaler: GradScaler | None, optimizer: Optimizer | None) -> bool:
        """Note that the model's gradients are about to be used; return whether a step begins with it.

        It does where an optimizer steps by what seemed to be an evaluation, or by gradients that `torch.func` made of forwards
        of its own.
        """
        ours = optimizer is None or self.owns(optimizer)
        self._by_hand.optimized |= optimizer is not None and ours
        begins = optimizer is not None and ours and self._backpropagated_evaluation
        if optimizer is not None and ours and self._transformed and not self.clock.begun:
            begins = self.begin_step()
        elif begins:
            self._training.trained_in_evaluation()
            begins = self.begin_step()
        self._looked_at |= ours
        self._followed &= not ours
        if scaler is not None and ours:
            self._scalers.append(scaler)
        return begins

    def closure_begins(self, optimizer: Optimizer) -> None:
        """Note that an optimizer runs the forwards and backwards of its step by itself."""
        self._in_closures |= self.owns(optimizer)
        self._by_hand.optimized |= self._in_closures

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """End the step, if it was the model's."""
        if self.owns(optimizer):
            self._in_closures = False
            self._by_hand.optimized = True
            self._end()

    def scaler_updated(self, scaler: GradScaler) -> None:
        """End the step, which the scaler may have skipped, if it serves the model's optimizers."""
        if any(scaler is known for known in self._scalers):
            self._scalers.clear()
            self._end()

    def zeroed(self, owner: Optimizer | nn.Module) -> bool:
        """End a step that the script skips by itself: it looked at the gradients, to clip them, and then let them go.

        Return whether another has begun: its forward ran before the script let go of the gradients.
        """
        if not self._looked_at or not self.clock.begun or self._in_closures or not self.owners.covers(owner):
            return False
        followed = self._followed
        self._end()
        return followed and self.begin_step()

    def _end(self) -> None:
        self.clock.end_step()
        self._looked_at = self._followed = False
        self.evaluated = self._backpropagated_evaluation = False
