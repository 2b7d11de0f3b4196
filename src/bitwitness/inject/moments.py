"""What a faulty device hears of a training step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.tap.moments import BackwardCall, StepListener


class _Device(Protocol):
    """A device whose steps these are."""

    def begin_backward(self) -> None:
        """Number the operators of the backward pass from zero."""

    def optimizer_stepped(self) -> None:
        """Mind which step it was, and let it end."""

    def end_step(self) -> None:
        """Let the step end."""


class DeviceMoments(StepListener):
    """What the device hears of a training step: not of complete gradients, at which a guard may run the same step again."""

    def __init__(self, device: _Device) -> None:
        self._device = device

    def around_backward(self, _call: BackwardCall) -> AbstractContextManager[None]:
        """Hear that a backward begins."""
        self._device.begin_backward()
        return nullcontext()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Hear that an optimizer has stepped."""
        del optimizer
        self._device.optimizer_stepped()

    def scaler_updated(self, scaler: GradScaler) -> None:
        """Hear that a scaler has been updated, which ends a step that it left out."""
        del scaler
        self._device.end_step()
