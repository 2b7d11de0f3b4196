"""Who is told before and after every optimizer's step: one entry in torch's global hooks, for all who listen.

Torch iterates over its dictionaries of hooks as they are (`Optimizer.profile_hook_step`), so that an entry which is added or
removed while another thread's optimizer steps ends that thread's training (``OrderedDict mutated during iteration``). Hence
one entry, kept as long as anybody listens, and neither made nor removed in the middle of another thread's step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from bitwitness.tap.compat import not_compiled, step_hooks
from bitwitness.tap.threads import elsewhere, wait_while_elsewhere

Before = Callable[[Optimizer, Any, Any], tuple[Any, Any] | None]
After = Callable[[Optimizer, Any, Any], None]

_FILE = Optimizer.profile_hook_step.__code__.co_filename
_STEPS = ("step", "_use_grad")  # what `profile_hook_step` calls between its two loops over hooks


class _Hooks:
    """The entry, and the listeners behind it; a listener that is added or leaves replaces the tuple that is gone through."""

    def __init__(self) -> None:
        self._before: tuple[Before, ...] = ()
        self._after: tuple[After, ...] = ()
        self._last: tuple[After, ...] = ()
        self._entries: tuple[RemovableHandle, ...] = ()
        self._changing = threading.RLock()

    def add(self, before: Before | None, after: After, *, last: bool) -> None:
        """Take a listener in; ``last``: it is told after all others."""
        with self._changing:
            if not self._entries:
                wait_while_elsewhere(_in_hooks)
                self._entries = (
                    register_optimizer_step_pre_hook(self._tell_before),
                    register_optimizer_step_post_hook(self._tell_after),
                )
            self._before = self._before if before is None else (*self._before, before)
            if last:
                self._last = (*self._last, after)
            else:
                self._after = (*self._after, after)

    def discard(self, before: Before | None, after: After) -> None:
        """Let one go; with the last one the entry goes, unless another thread is at it: then it stays, and does nothing."""
        with self._changing:
            self._before = tuple(one for one in self._before if one != before)
            self._after = tuple(one for one in self._after if one != after)
            self._last = tuple(one for one in self._last if one != after)
            if not self._after and not self._last and not elsewhere(_in_hooks):
                for entry in self._entries:
                    entry.remove()
                self._entries = ()

    def _tell_before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if torch.compiler.is_compiling():  # torch.compile(optimizer.step): dynamo is not to trace us
            _outside_graphs(self._before_all, optimizer, args, kwargs)
            return None
        return self._before_all(optimizer, args, kwargs)

    def _tell_after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            _outside_graphs(self._after_all, optimizer, args, kwargs)
        else:
            self._after_all(optimizer, args, kwargs)

    def _before_all(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        changed = None
        for tell in self._before:
            if (other := tell(optimizer, args, kwargs)) is not None:
                changed = args, kwargs = other
        return changed

    def _after_all(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for tell in (*self._after, *self._last):
            tell(optimizer, args, kwargs)


@not_compiled
def _outside_graphs(tell: Callable[..., Any], *args: Any) -> None:
    """Tell of an optimizer's step between two compiled graphs; torch itself breaks the graph there, so none is split."""
    tell(*args)


_HOOKS = _Hooks()
"""The process's, as torch's dictionaries are."""


def told_of_steps(after: After, before: Before | None = None, *, last: bool = False) -> Callable[[], None]:
    """Have functions called around each optimizer's step, as torch's global hooks are; return what ends it.

    ``last``: ``after`` is called when all others have been.
    """
    _HOOKS.add(before, after, last=last)
    return lambda: _HOOKS.discard(before, after)


def others_around(optimizer: Optimizer) -> bool:
    """Tell whether anybody else is called around an optimizer's steps, who may change what it reads or has written."""
    return any(hook not in (_HOOKS._tell_before, _HOOKS._tell_after) for hook in step_hooks(optimizer))


def with_closure(
    args: Any, kwargs: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> tuple[Any, Any] | None:
    """Return the arguments of an optimizer's step (the optimizer first) with its closure wrapped; None where it has none."""
    if len(args) > 1 and callable(args[1]):
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    return None


def in_step() -> bool:
    """Tell whether this thread runs within an optimizer's step, as in a closure."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_step(frame):
            return True
        frame = frame.f_back
    return False


def _is_step(frame: FrameType) -> bool:
    return frame.f_code.co_filename == _FILE and frame.f_code.co_name == "wrapper"


def _in_hooks(frame: FrameType | None) -> bool:
    """Tell whether a thread is going through an optimizer's hooks."""
    inner = ""  # what the frame that is looked at has called
    while frame is not None:
        if _is_step(frame):
            return inner not in _STEPS
        inner, frame = frame.f_code.co_name, frame.f_back
    return False
