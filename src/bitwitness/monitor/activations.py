"""What enters and leaves modules, and the gradients that come back: measured while the values still are in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.metrics import Attention
from bitwitness.monitor.sheet import Sheet
from bitwitness.tap.compat import in_transform
from bitwitness.tap.compiled import is_compiled
from bitwitness.tap.hooks import ModuleHook
from bitwitness.tap.modules import ROOT, in_backward
from bitwitness.tap.ownwork import in_replay, own_work
from bitwitness.tap.slots import arguments_of, results_of

Fail = Callable[[str, BaseException], None]
"""Told of an error inside the monitor: which part, and what; that part ends, the training goes on."""


class ModuleMetric(Protocol):
    """Computes numbers of a module from what a call of it read and made."""

    def wants(self, module: nn.Module, path: str, root: nn.Module) -> bool:
        """Tell whether it has anything to say of a module."""

    def of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        """Yield metric, slot and a tensor of one number each."""


class Activations:
    """Hooks on the modules that are looked at, put on for the steps that are.

    Parameters
    ----------
    root
        The user's own module.
    config
        What to look at.
    metrics
        What is computed of modules on request.
    fail
        Told of an error; modules are not looked at any more then.

    """

    def __init__(self, root: nn.Module, config: MonitorConfig, metrics: Sequence[ModuleMetric], fail: Fail) -> None:
        self._root = root
        self._fail = fail
        self._forward = config.looks_at("activation")
        self._backward = config.looks_at("activation_grad")
        self._statistics = self._forward or self._backward
        self._paths = _reachable(root, config)
        self._metrics = {
            module: found
            for module in self._paths
            if (found := [m for m in metrics if m.wants(module, self._paths[module], root)])
        }
        self._hooks: list[ModuleHook] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._attention = Attention(self._attended, fail) if "attention" in config.metrics else None
        self._running: list[str] = []
        self._sheet: Sheet | None = None
        self.evaluating = False
        """The forward that runs is none of a step's."""

    @property
    def looks(self) -> bool:
        """Whether anything of modules is looked at."""
        wanted = self._forward or self._backward or bool(self._metrics) or self._attention is not None
        return bool(self._paths) and wanted

    def attach(self, sheet: Sheet) -> None:
        """Look at the modules of a step; the root's own call is told by `root_called`, `root_returned`."""
        self.detach()
        if not self.looks:
            return
        self._sheet = sheet
        before, after = ModuleHook(self._before), ModuleHook(self._after)
        self._hooks = [before, after]
        if self._attention is not None:
            self._attention.attach()
        for module in self._paths if self._statistics or self._attention is not None else self._metrics:
            if module is self._root:
                continue
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def detach(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.let_go()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks = []
        if self._attention is not None:
            self._attention.detach()
        self._sheet = None

    def root_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at what the model is called with."""
        self._running.clear()
        if self._root in self._paths:
            self._before(self._root, args, kwargs)

    def root_returned(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Look at what it returned."""
        if self._root in self._paths and result is not None:
            self._after(self._root, args, kwargs, result)

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._looks_away():
            return
        try:
            path = self._paths[module]
            self._running.append(path)
            with own_work():
                for slot, tensor in () if not self._statistics else arguments_of(args, kwargs):
                    self._see(path, slot, tensor)
        except Exception as error:
            self._give_up(error)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._looks_away():
            return
        try:
            path = self._paths[module]
            while self._running and self._running.pop() != path:
                pass  # a call inside that raised
            with own_work():
                if self._statistics:
                    for slot, tensor in results_of(result):
                        self._see(path, slot, tensor)
                if module in self._metrics:
                    self._compute(module, path, args, kwargs, result)
        except Exception as error:
            self._give_up(error)

    def _looks_away(self) -> bool:
        return self._sheet is None or self.evaluating or in_replay() or in_backward() or in_transform()

    def _see(self, path: str, slot: str, tensor: torch.Tensor) -> None:
        sheet = self._sheet
        if sheet is None or tensor.is_meta:
            return
        if self._forward:
            with torch.no_grad():
                sheet.measure("activation", path, slot, tensor)
        if self._backward and tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(_Gradient(self, sheet, path, slot, sheet.micro))

    def _compute(
        self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        sheet = self._sheet
        if sheet is None:
            return
        with torch.no_grad():
            for one in self._metrics[module]:
                for metric, slot, value in one.of(module, args, kwargs, result):
                    sheet.value("module", path, metric, value, slot=slot, micro=sheet.micro)

    def _attended(self, metric: str, value: torch.Tensor) -> None:
        """Take a number of the attention that the running module computes."""
        if self._sheet is not None and not self._looks_away() and self._running:
            self._sheet.value("module", self._running[-1], metric, value, micro=self._sheet.micro)

    def saw(self, sheet: Sheet, path: str, slot: str, grad: torch.Tensor) -> None:
        """Take the gradient of an activation, complete as it passes."""
        if sheet is not self._sheet or in_replay():
            return
        try:
            with own_work(), torch.no_grad():
                sheet.measure("activation_grad", path, slot, grad)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self.detach()
        self._fail("activations", error)


class _Gradient:
    """A hook on one activation: of a tensor that several modules read, each shows the whole gradient."""

    __slots__ = ("_micro", "_owner", "_path", "_sheet", "_slot")

    def __init__(self, owner: Activations, sheet: Sheet, path: str, slot: str, micro: int) -> None:
        self._owner, self._sheet, self._path, self._slot, self._micro = owner, sheet, path, slot, micro

    def __call__(self, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        now, self._sheet.micro = self._sheet.micro, self._micro
        self._owner.saw(self._sheet, self._path, self._slot, grad)
        self._sheet.micro = now


def _reachable(root: nn.Module, config: MonitorConfig) -> dict[nn.Module, str]:
    """Return the modules that are asked for, with their paths; none inside compiled ones, where hooks would be traced."""
    found: dict[nn.Module, str] = {}
    inside: list[str] = []
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or any(name.startswith(prefix) for prefix in inside):
            continue
        if is_compiled(module):
            inside.append(f"{name}." if name else "")
            continue
        if config.wants_module(name or ROOT):
            found[module] = name or ROOT
    return found
