"""Hooks of the script's own on gradients: what they change on the way to the parameters, no re-execution repeats.

Autograd does not list the hooks of a tensor or of a node of its graph, so their registration is watched. A hook that only
looks (it returns None, and writes nothing) is no hindrance: a replay goes without it, and so without its side effects. Hooks
on parameters are different: autograd runs them in a replay, too, but for those behind the accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from bitwitness.capture.reasons import CHANGED_BY_HOOK, PARAMETER_HOOKS
from bitwitness.capture.step import StepRecord
from bitwitness.capture.structure import tensors_of
from bitwitness.tap.compat import NodeHooks
from bitwitness.tap.ownwork import in_own_work, own_work
from bitwitness.tap.patching import replaced

_OURS = "bitwitness"
_HARMLESS = ("torch.autograd.graph", "torch.distributed", _OURS)
"""Modules whose hooks on gradients of a graph change nothing that a local replay lacks."""


def parameter_hooks(parameters: Sequence[nn.Parameter]) -> list[tuple[Any, ...]]:
    """Return the hooks on each parameter's gradient, as they are now."""
    return [
        tuple(hook for hook in hooks.values() if not _comes_from(hook, _OURS)) if (hooks := p._backward_hooks) else ()
        for p in parameters
    ]


class GradientHooks:
    """Watches what the script's hooks do to gradients, until `close`.

    Parameters
    ----------
    record
        Returns the step at hand, which is given up where a hook changes something.
    apart
        Asked at each registration whether it does not count: the model's own forward registers (a replay does that, too).

    """

    def __init__(self, record: Callable[[], StepRecord], apart: Callable[[], bool]) -> None:
        self._record = record
        self._apart = apart
        self._closed = False
        self._accumulated: list[dict[int, Any]] = []
        self._patches = ExitStack()
        self._patches.enter_context(replaced(torch.Tensor, "register_hook", self._on_tensor))
        self._patches.enter_context(replaced(NodeHooks, "_register_hook", self._on_node))

    def note(self, parameters: Sequence[nn.Parameter]) -> None:
        """See, as a backward begins, which hooks stand on the parameters."""
        record, hooks = self._record(), parameter_hooks(parameters)
        if record.hooks is not None and record.hooks != hooks:
            record.give_up(PARAMETER_HOOKS)
        record.hooks = hooks
        for parameter in parameters:
            if behind := parameter._post_accumulate_grad_hooks:
                self._watch_behind(behind)

    def _watch_behind(self, hooks: dict[int, Any]) -> None:
        """Stand around the hooks that run when a parameter's gradient has been accumulated, in their places."""
        unwatched = {k: h for k, h in hooks.items() if not (self._is_ours(h) or _comes_from(h, _HARMLESS))}
        for key, hook in unwatched.items():
            hooks[key] = _Accumulated(hook, self)
        if unwatched:
            self._accumulated.append(hooks)

    def _is_ours(self, hook: Any) -> bool:
        return isinstance(hook, _Watched) and hook.owner is self

    def close(self) -> None:
        """Watch no more."""
        self._closed = True
        self._patches.close()
        for hooks in self._accumulated:
            for key, hook in hooks.items():
                if self._is_ours(hook):
                    hooks[key] = hook.hook

    def changed(self, hook: Any) -> None:
        """Say that a hook changed a gradient."""
        if not self._closed:
            self._record().give_up(_reason(hook))

    def doubt(self, hook: Any, changed: torch.Tensor) -> None:
        """Say that a hook may have changed a gradient: bool, 0-d, still on its device."""
        if not self._closed:
            self._record().doubts.append((_reason(hook), changed))

    def _on_tensor(self, original: Callable[..., Any]) -> Any:
        def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
            return original(tensor, hook if tensor.is_leaf else self._watched(hook))

        register_hook.__doc__ = original.__doc__
        return register_hook

    def _on_node(self, original: Any) -> Any:
        register = original.__func__

        def _register_hook(backward_hooks: Any, hook: Any) -> Any:
            return register(backward_hooks, self._watched(hook))

        return staticmethod(_register_hook)

    def _watched(self, hook: Any) -> Any:
        unasked = self._closed or self._apart() or in_own_work() or not self._record().forwards
        return hook if unasked or self._is_ours(hook) or _comes_from(hook, _HARMLESS) else _Watched(hook, self)


class _Watched:
    """A hook that tells whether it changed what it was given."""

    def __init__(self, hook: Callable[..., Any], owner: GradientHooks) -> None:
        self.hook = hook
        self.owner = owner

    def __call__(self, *args: Any) -> Any:
        given = tensors_of(args)
        versions = [tensor._version for tensor in given]
        result = self.hook(*args)
        if result is not None or [tensor._version for tensor in given] != versions:
            self.owner.changed(self.hook)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hook, name)


class _Accumulated(_Watched):
    """A hook behind the accumulation, which is given the parameter; a change through ``.data`` has no version."""

    def __call__(self, parameter: torch.Tensor) -> Any:
        before, version = parameter.grad, None if parameter.grad is None else parameter.grad._version
        norm = _norm(before)
        result = self.hook(parameter)
        after = parameter.grad
        if after is not before or (after is not None and after._version != version):
            self.owner.changed(self.hook)
        elif norm is not None:
            with own_work():  # the comparison, too, is an operator that modes of the script's would see
                self.owner.doubt(self.hook, _norm(after) != norm)
        return result


def _reason(hook: Any) -> str:
    return CHANGED_BY_HOOK.format(getattr(hook, "__qualname__", type(hook).__qualname__))


def _norm(gradient: torch.Tensor | None) -> Any:
    if gradient is None or gradient.layout is not torch.strided:
        return None
    with own_work(), torch.no_grad():
        return torch.linalg.vector_norm(gradient.detach())


def _comes_from(hook: Any, places: str | tuple[str, ...]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(places)
