"""The number of the training step, counted the same by everyone who needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Return the clock, in seconds, by which work of a training on ``device`` is measured.

    On a CPU the process's own time: what other processes take there is none of its price. On an accelerator wall clock.
    """
    return time.process_time if device.type == "cpu" else time.perf_counter


class Timer:
    """Adds up what several parts of the work take, in seconds by `stopwatch`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._now = now

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Add what runs inside."""
        started = self._now()
        try:
            yield
        finally:
            self.seconds += self._now() - started


class StepClock:
    """Counts optimizer steps from 0.

    A step ends when an optimizer stepped or a gradient scaler updated (a scaler may skip the optimizer), and the next
    one begins with the next training forward: two optimizers, or a scaler and its optimizer, end one step together.
    """

    def __init__(self, start: int = 0) -> None:
        self.step = start
        self.micro = 0
        self.begun = False
        """Whether a forward of the step has begun."""
        self._ended = False

    def end_step(self) -> None:
        """Say that an optimizer stepped or a scaler updated."""
        self._ended = True
        self.begun = False

    def go_on_after(self, step: int) -> None:
        """Let the next forward begin the step after this one, whatever was counted here."""
        self.step = step
        self.micro = 0
        self.end_step()

    def begin_forward(self) -> bool:
        """Say that a training forward begins; return whether it is the first of a new step."""
        first = self._ended
        self.begun = True
        if first:
            self.step += 1
            self.micro = 0
            self._ended = False
        return first


class TrainingForwards:
    """Tells a model's training forwards from its evaluations, the same for everyone who counts steps.

    An evaluation is a forward without gradients, or in evaluation mode, of a model that is trained. A model that only ever
    runs in evaluation mode is trained in it; one that never has gradients infers, and each of its forwards is a step.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._trained = False
        self.inferring = True
        """Whether no forward with gradients was seen yet."""

    def evaluates(self) -> bool:
        """Tell whether the forward that begins is an evaluation."""
        if not torch.is_grad_enabled():
            return not self.inferring
        if not self._root.training and self._trained:
            return True
        self.inferring = False
        self._trained |= self._root.training
        return False
