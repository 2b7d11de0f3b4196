"""Records updates: what each optimizer read and wrote, with its settings and the age of its state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.record.log import Log
from bitwitness.record.state import StateRecorder
from bitwitness.record.values import Noted
from bitwitness.site import Site, site_at

_NOT_SETTINGS = ("params", "param_names")


class UpdateRecorder:
    """Adds the rows of the updates of one root's parameters.

    Parameters
    ----------
    parameters
        Knows their names.
    log
        Takes the rows.
    optimizer_state
        Record exponential averages and the like, too.

    """

    def __init__(self, parameters: StateRecorder, log: Log, *, optimizer_state: bool) -> None:
        self._parameters = parameters
        self._log = log
        self._with_state = optimizer_state
        self._began: dict[Optimizer, list[tuple[str, nn.Parameter, int]]] = {}

    def reread(self, optimizer: Optimizer) -> None:
        """Look again at the gradients that an optimizer is about to read: code that ran since may have edited them."""
        held = [parameter.grad for _, _, parameter in self._held(optimizer)]
        self._log.values.reread(grad for grad in held if grad is not None)

    def begin(self, optimizer: Optimizer, known: dict[int, Noted]) -> None:
        """Record what an optimizer is about to read: gradients (clipped by now), parameters, its state.

        ``known``: what `StateRecorder.gradients` found just now.
        """
        log, settings, began = self._log, _Settings(optimizer), []
        for group, name, parameter in self._held(optimizer):
            node, text = log.node(), settings.text(group, parameter)
            began.append((name, parameter, node))
            if (grad := parameter.grad) is not None:
                site = _site(name, optimizer, "grad")
                log.record(site, grad, node, "optimizer", args=text, noted=known.get(id(grad)))
            log.record(_site(name, optimizer, "param"), parameter, node, "optimizer", args=text)
            for key, value in _state(optimizer, parameter) if self._with_state else ():
                log.record(_site(name, optimizer, f"state.{key}"), value, node, "optimizer", args=text)
        self._began[optimizer] = began

    def end(self, optimizer: Optimizer) -> None:
        """Record what it made of the parameters."""
        log, began = self._log, self._began.pop(optimizer, [])
        for _, parameter, node in began:
            log.values.written(parameter, node)
        for name, parameter, node in began:
            result = log.see(_site(name, optimizer, "out"), parameter)
            if result is not None:
                log.add(result, node, "optimizer")
                log.values.lasts(parameter, result.noted)
            for key, value in _state(optimizer, parameter) if self._with_state else ():
                log.record(_site(name, optimizer, f"out.{key}"), value, node, "optimizer")

    def _held(self, optimizer: Optimizer) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Yield the root's parameters that an optimizer holds: its group's number, name, parameter."""
        names = self._parameters.names
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if (name := names.get(id(parameter))) is not None:
                    yield number, name, parameter


class _Settings:
    """The settings of an optimizer's groups, with what is known of a parameter's state, as JSON."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [{"group": number, **_settings(group)} for number, group in enumerate(optimizer.param_groups)]
        self._texts: dict[tuple[int, str], str] = {}  # a group's parameters are of few ages

    def text(self, group: int, parameter: nn.Parameter) -> str:
        """Return what stands beside a parameter's update."""
        key = group, _age(self._optimizer.state.get(parameter) or {})
        if key not in self._texts:
            settings = {**self._groups[group], "state": key[1]}
            self._texts[key] = json.dumps({"f": type(self._optimizer).__name__, "k": settings})
        return self._texts[key]


def _site(name: str, optimizer: Optimizer, slot: str) -> Site:
    """Return a site of one parameter's update: the parameter's path stands for the module."""
    return site_at(name, type(optimizer).__name__, 0, "optim", slot)


def _state(optimizer: Optimizer, parameter: nn.Parameter) -> Iterable[tuple[str, torch.Tensor]]:
    state = optimizer.state.get(parameter, {})
    return [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]


def _age(state: dict[str, object]) -> str:
    """Return how many steps an optimizer's state of one parameter has seen, or what it holds, or that there is none."""
    step = state.get("step")
    if isinstance(step, torch.Tensor):
        step = step.item() if step.numel() == 1 and step.device.type == "cpu" else None
    if isinstance(step, int | float):
        # Made before the first step, it is as good as none; set back to zero later, it has averages of its own.
        return f"of {int(step)} steps" if step or _holds_averages(state) else "none"
    return ", ".join(sorted(key for key, value in state.items() if value is not None)) or "none"


def _holds_averages(state: dict[str, object]) -> bool:
    """Return whether a state on the CPU holds anything but zeros beside the number of its steps."""
    found = [value for key, value in state.items() if key != "step" and isinstance(value, torch.Tensor)]
    return any(value.device.type == "cpu" and bool(value.any()) for value in found)


def _settings(group: dict[str, object]) -> dict[str, object]:
    def plain(value: object) -> object:
        if isinstance(value, torch.Tensor):  # a learning rate in a tensor
            return value.item() if value.numel() == 1 and value.device.type == "cpu" else str(value.dtype)
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value if isinstance(value, bool | int | float | str | None) else type(value).__name__

    return {key: plain(value) for key, value in group.items() if key not in _NOT_SETTINGS}
