"""Records modules: what entered and left each call, the parameters it used, and the gradients that came back.

The gradients are those of the tensors themselves, complete when they pass: of a tensor that several modules read (a residual
stream) each of them shows the sum. What one operator alone contributed is in the operators' rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bitwitness.record.log import Fail, Log, NodeValue
from bitwitness.record.state import StateRecorder
from bitwitness.session.instrument import Forward, Kind
from bitwitness.site import Site, site_at
from bitwitness.tap.compat import in_transform
from bitwitness.tap.frames import Stacks
from bitwitness.tap.hooks import ModuleHook
from bitwitness.tap.modules import ROOT
from bitwitness.tap.ownwork import in_replay, looking, own_work
from bitwitness.tap.slots import arguments_of, results_of

_MODES = [json.dumps({"f": "", "k": {"training": training}}) for training in (False, True)]


def mode_text(module: nn.Module) -> str:
    """Return whether a module trains, as a row's arguments."""
    return _MODES[module.training]


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and running statistics that a module itself reads, with their slots."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in _running(module):
        yield f"buffer.{name}", buffer


def _running(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the running statistics that a module's forward updates, without torch counting it as a change."""
    if not module.training:
        return []
    found = [(name, module._buffers.get(name)) for name in ("running_mean", "running_var")]
    return [(name, tensor) for name, tensor in found if tensor is not None]


class ModuleRecorder:
    """Names parameters as modules begin and, where modules are recorded, adds their rows.

    Parameters
    ----------
    root
        The user's own module.
    log
        Takes the rows.
    operators
        Operators are recorded, too: they show what becomes of running statistics.
    state
        Told of each module's path before it reads its parameters; knows what these are called.
    enabled
        Record modules; else only names are given, which operators' rows need.
    stacks
        Numbers the lines that call modules.
    fail
        Told of an error; modules are not recorded any more then.

    """

    def __init__(
        self,
        root: nn.Module,
        log: Log,
        stacks: Stacks | None,
        fail: Fail,
        *,
        enabled: bool,
        operators: bool,
        state: StateRecorder,
    ) -> None:
        self._state = state
        self._operators = operators
        self._root = root
        self._log = log
        self._stacks = stacks
        self._enabled = enabled
        self._fail = fail
        self._paths = {module: name or ROOT for name, module in root.named_modules()}
        self._calls: Counter[str] = Counter()
        self._open: list[tuple[nn.Module, int, list[NodeValue], int, int]] = []
        self._hooks: list[ModuleHook] = []
        self._outermost = root
        self._in_parts: tuple[int, int] | None = None  # the step and micro-batch of a part that the script called last
        self._evaluating = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self) -> None:
        """Put hooks on all modules but the root, whose calls `begin` and `end` tell of."""
        if self._hooks:
            return
        self._hooks = [ModuleHook(self._before), ModuleHook(self._after)]
        for module in self._paths:
            if module is self._root:
                continue
            self._handles.append(module.register_forward_pre_hook(self._hooks[0], with_kwargs=True))
            if self._enabled:
                self._handles.append(module.register_forward_hook(self._hooks[1], with_kwargs=True))

    def detach(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.let_go()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks = []
        self._open.clear()

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Look away meanwhile: the forward that runs is none of a step's."""
        self._evaluating = True
        try:
            yield
        finally:
            self._evaluating = False

    def begin(self, forward: Forward, *, listed: bool) -> None:
        """Begin a forward: a call of the root, or of one of its parts where the script calls these.

        ``listed``: torch has our hook of that part in its list; it has not where the hooks were put on in this very call.
        """
        part = forward.part
        now = self._log.now
        if self._in_parts != now:  # else calls are counted as where one call of the model makes them all
            self._calls.clear()
        self._in_parts = None if part is None else now
        self._open.clear()
        self._outermost = part or self._root
        if self._hooks and (part is None or not listed):
            # As in the forward, for gradients to be followed.
            with torch.set_grad_enabled(forward.kind is Kind.TRAINING):
                self._before(self._outermost, forward.args, forward.kwargs)

    def end(self, part: nn.Module | None, result: Any) -> None:
        """End a forward; ``result``: None where it raised."""
        if self._hooks and part is None and result is not None:
            self._after(self._root, (), {}, result)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Between two steps a script may call a part whose step nobody knows as yet: it is none of the step's before.
        if in_replay() or self._evaluating or not self._log.begun:
            return
        try:
            with own_work():
                self._enter(module, args, kwargs)
        except Exception as error:
            self.detach()
            self._fail("modules", error)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        log, path = self._log, self._paths[module]
        read = self._state.read_by(path)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in read:
                log.values.name(tensor, name if path == ROOT else f"{path}.{name}")
        if module is self._outermost:
            for slot, tensor in arguments_of(args, kwargs):
                log.values.name(tensor, f"input {slot.removeprefix('in.')}")
        if not self._enabled:
            return
        call = self._calls[path]
        self._calls[path] += 1
        op = type(module).__name__
        backward = log.node()
        entries = []
        for slot, tensor in arguments_of(args, kwargs):
            entry = log.see(site_at(path, op, call, "forward", slot), tensor)
            if entry is not None:
                entries.append(entry)
            self._follow(tensor, site_at(path, op, call, "backward", f"grad_{slot}"), backward)
        for name, tensor in _state(module):
            entry = log.see(site_at(path, op, call, "forward", name), tensor, noted=read.get(id(tensor)))
            if entry is not None:
                entries.append(entry)
        self._open.append((module, call, entries, -1 if self._stacks is None else self._stacks.current(), backward))

    def _after(self, module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        if in_replay() or self._evaluating:
            return
        try:
            with own_work():
                self._leave(module, result)
        except Exception as error:
            self.detach()
            self._fail("modules", error)

    def _leave(self, module: nn.Module, result: Any) -> None:
        while self._open and self._open[-1][0] is not module:
            self._open.pop()  # a forward that raised
        if not self._open:
            return
        _, call, entries, stack, backward = self._open.pop()
        log, path, op = self._log, self._paths[module], type(module).__name__
        node = log.node()
        args: str | None = mode_text(module)
        for entry in entries:
            log.add(entry, node, "module", args=args, stack=stack)
            args = None
        for slot, tensor in results_of(result):
            entry_ = log.see(site_at(path, op, call, "forward", slot), tensor)
            if entry_ is not None:
                log.add(entry_, node, "module", stack=stack)
            self._follow(tensor, site_at(path, op, call, "backward", f"grad_{slot}"), backward)
        running = [] if self._operators else _running(module)
        log.values.changed(tensor for _, tensor in running)
        for name, tensor in running:
            log.record(site_at(path, op, call, "forward", f"out.{name}"), tensor, node, "module")

    def _follow(self, tensor: torch.Tensor, site: Site, node: int) -> None:
        """Record the gradient of a tensor when it passes.

        A parameter of the model that is given to modules has one already, and shows in each backward what all that read it
        contribute.
        """
        if (
            not tensor.requires_grad
            or (tensor.is_leaf and id(tensor) in self._state.names)
            or not torch.is_grad_enabled()
            or in_transform()
            or not self._log.selection.wants(site)
        ):
            return
        last = _last_hook(tensor)
        if last is None or not last.takes(self._hooks[0], tensor):
            last = _Followed(self._hooks[0], tensor, self._passed)
            tensor.register_hook(last)
        last.places.append((site, node))

    def _passed(self, grad: torch.Tensor, places: list[tuple[Site, int]]) -> None:
        """Record a gradient at each of the places that the tensor entered or left."""
        try:
            with looking():
                for site, node in places:
                    self._log.record(site, grad, node, "module")
        except Exception as error:
            self.detach()
            self._fail("module gradients", error)


class _Followed:
    """The hook of one tensor, for all the modules that it leaves and enters without another hook in between.

    Parameters
    ----------
    alive
        In force as long as the modules' hooks are.
    tensor
        Whose gradient this is, as it is now: once it is written in place, that is another one's.
    passed
        Takes the gradient, and the places.

    """

    __slots__ = ("_alive", "_passed", "_version", "places")

    def __init__(
        self, alive: ModuleHook, tensor: torch.Tensor, passed: Callable[[torch.Tensor, list[tuple[Site, int]]], None]
    ) -> None:
        self._alive, self._passed, self._version = alive, passed, tensor._version
        self.places: list[tuple[Site, int]] = []

    def takes(self, alive: ModuleHook, tensor: torch.Tensor) -> bool:
        """Tell whether a further place of the tensor can be told by this hook."""
        return self._alive is alive and self._version == tensor._version

    def __call__(self, grad: torch.Tensor | None) -> None:
        # none reaches an output that is unused, past a backward hook of the script's
        if grad is not None and not self._alive.inert:
            self._passed(grad, self.places)


def _last_hook(tensor: torch.Tensor) -> _Followed | None:
    """Return the hook that was put on a tensor last, if it is ours."""
    hooks = tensor._backward_hooks
    last = next(reversed(hooks.values()), None) if hooks else None
    return last if type(last) is _Followed else None
