"""The number of the training step, counted once for everyone who needs it."""

from __future__ import annotations

import torch
from torch import nn

from bitwitness.checkpoint.resumed import resumed_at


class StepClock:
    """Counts a training's steps from 0, or from those that a checkpoint has behind it that it was resumed from.

    A step is what an optimizer's step ends, or a gradient scaler that skips one, or a script that drops the gradients
    after it looked at them; the next one begins with the next training forward. So two optimizers, or a scaler and its
    optimizer, end one step together.

    Attributes
    ----------
    step
        The number of the step that runs or, between two, of the one that has ended.
    micro
        How many backwards the step had before its latest forward: the number of the micro-batch.
    begun
        Whether a forward of the step has begun that nothing has ended yet.
    ended
        How many steps have ended.

    """

    def __init__(self, start: int = 0) -> None:
        self.step = start
        self.micro = 0
        self.begun = False
        self.ended = 0
        self._over = False
        self._resumed = 0

    def end_step(self) -> None:
        """End the step that runs, unless something has ended it already."""
        self.ended += not self._over
        self._over = True
        self.begun = False

    def go_on_with(self, step: int) -> None:
        """Give the next forward's step this number, whatever was counted here."""
        self.step, self.micro = step, 0
        self._over = self.begun = False

    def begin_forward(self) -> bool:
        """Say that a training forward begins; return whether it is the first one of a step."""
        if (resumed := resumed_at()) != self._resumed:
            self._resumed = resumed
            self.go_on_with(resumed)
        if self._over:
            self.step += 1
            self.micro = 0
            self._over = False
        first, self.begun = not self.begun, True
        return first


class TrainingForwards:
    """Tells a model's training forwards from its evaluations.

    An evaluation is a forward without gradients, or in evaluation mode, of a model that is trained. A model that only ever
    runs in evaluation mode is trained in it, and so is one whose optimizer steps by what such a forward led to
    (`trained_in_evaluation`): its script forgot ``train()``, or wants it so. One that never has gradients infers, and each of
    its forwards is a step.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._in_training_mode = False
        self._any_mode = False
        self.inferring = True
        """Whether nothing says yet that the model is trained."""

    def evaluates(self) -> bool:
        """Tell whether the forward that begins is an evaluation."""
        if not torch.is_grad_enabled():
            return not self.inferring
        if not self._root.training and self._in_training_mode and not self._any_mode:
            return True
        self.inferring = False
        self._in_training_mode |= self._root.training
        return False

    def trained_in_evaluation(self) -> None:
        """Take forwards with gradients for training from now on, whatever mode the model is in."""
        self._any_mode = True
