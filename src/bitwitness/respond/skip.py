"""Keeping every optimizer from using one step's gradients, which the script may go on reading.

A step cannot be called off from within its hooks, but every optimizer leaves alone what has no gradient: weights, momentum,
decay, step counters. So the gradients are away while an optimizer steps, and there before and after, for a script that
logs or clips them. What is left of them is zeroed before the next step's backward adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class _Away:
    """What was taken from one optimizer for the time of its step."""

    gradients: list[tuple[nn.Parameter, torch.Tensor]]
    settings: list[dict[str, Any]] | None


class Skip:
    """Skips steps of one root's parameters.

    Parameters
    ----------
    parameters
        Those of the root; others that an optimizer holds are stepped as ever, but for what `leave_out` is told of.

    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._ours = {id(p) for p in parameters}
        self._record: int | None = None
        self._stepping: list[Optimizer] = []  # an optimizer's step may call its base class's, with hooks of its own
        self._away: dict[int, _Away] = {}
        self._left_out: dict[int, nn.Parameter] = {}

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        """Skip steps of these parameters from now on."""
        self._parameters, self._ours = list(parameters), {id(p) for p in parameters}

    def begin(self, number: int) -> None:
        """Let no optimizer use the gradients of the step record ``number``; one may be stepping now, by a closure."""
        self._record = number
        for optimizer in self._stepping:
            self._take(optimizer)

    def leave_out(self, others: Sequence[nn.Parameter], *, emptied: bool) -> int:
        """Let no optimizer use the gradients that other parameters have now, until they are cleared; return how many do.

        ``emptied``: with zeros in them, so that the norm by which the script is about to clip all gradients is not theirs.
        """
        self._left_out = {id(p): p for p in others if p.grad is not None}
        with torch.no_grad():
            for parameter in self._left_out.values() if emptied else ():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        for optimizer in self._stepping if self._left_out else ():
            self._take(optimizer)
        return len(self._left_out)

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the gradients away, if they are not to be used."""
        self._stepping.append(optimizer)
        if self._record is not None or self._left_out:
            self._take(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Put them back."""
        if optimizer in self._stepping:
            self._stepping.remove(optimizer)
        away = None if optimizer in self._stepping else self._away.pop(id(optimizer), None)
        if away is None:
            return
        for parameter, gradient in away.gradients:
            if parameter.grad is None:
                parameter.grad = gradient
        if away.settings is not None:
            _put_back(optimizer, away.settings)

    def before_backward(self, number: int) -> None:
        """Say that gradients of the step record ``number`` are about to be added to what is there."""
        self._left_out = {
            key: p for key, p in self._left_out.items() if p.grad is not None and bool(p.grad.detach().any())
        }
        if self._record in (None, number):
            return
        self._record = None
        self._away.clear()  # of a closure, which zeroed the old ones
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def _unused(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter's gradient is one that is not to be used."""
        if id(parameter) in self._ours:
            return self._record is not None
        return id(parameter) in self._left_out

    def _take(self, optimizer: Optimizer) -> None:
        present = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        taken = [(p, p.grad) for p in present if self._unused(p)]
        if not taken:
            return
        # Some optimizers count their steps in the group, and do so without any gradient, too.
        settings = [_settings(group) for group in optimizer.param_groups] if len(taken) == len(present) else None
        self._away[id(optimizer)] = _Away(taken, settings)
        for parameter, _ in taken:
            parameter.grad = None


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _put_back(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    for group, before in zip(optimizer.param_groups, settings, strict=False):
        for name in [name for name in group if name != "params" and name not in before]:
            del group[name]
        for name, value in before.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)
            else:
                group[name] = value
