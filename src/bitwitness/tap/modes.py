"""Torch's two stacks of modes, and ``__torch_function__``: the script's see what the script computes, and nothing of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

_Stack = tuple[Callable[[], list[Any]], Callable[[], Any], Callable[[Any], None]]
_STACKS: tuple[_Stack, ...] = (
    (overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode),
    (dispatch._get_current_dispatch_mode_stack, dispatch._pop_mode, dispatch._push_mode),
)
plain_tensors: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
_scripts_tensors: Callable[[], AbstractContextManager[Any]] = torch._C._EnableTorchFunction
_aside: ContextVar[tuple[list[Any], list[Any]] | None] = ContextVar("bitwitness_modes_aside", default=None)


def scripts_modes() -> tuple[list[Any], list[Any]]:
    """Return the function modes and the dispatch modes that the script has entered, also while they are set aside."""
    functions, dispatching = _aside.get() or (_STACKS[0][0](), _STACKS[1][0]())
    return [mode for mode in functions if not is_ours(mode)], [mode for mode in dispatching if not is_ours(mode)]


def is_ours(thing: Any) -> bool:
    """Tell whether a mode, an object, a function or a class is one of bitwitness's."""
    return str(getattr(thing, "__module__", "")).startswith("bitwitness.")


def scripts_modes_off() -> AbstractContextManager[None]:
    """Run what is inside under bitwitness's own modes alone; the script's tensors are plain ones there."""
    if not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
        return plain_tensors()
    return _off()


@contextmanager
def _off() -> Iterator[None]:
    there = tuple(read() for read, _, _ in _STACKS)
    ours = tuple([mode for mode in modes if is_ours(mode)] for modes in there)
    if ours == there:
        with plain_tensors():
            yield
        return
    token = _aside.set((there[0], there[1])) if _aside.get() is None else None
    for stack, modes in zip(_STACKS, ours, strict=True):
        _set(stack, modes)
    try:
        with plain_tensors():
            yield
    finally:
        for stack, modes in zip(_STACKS, there, strict=True):
            _back(stack, modes)
        if token is not None:
            _aside.reset(token)


@contextmanager
def scripts_modes_back(*, backward: bool = False) -> Iterator[None]:
    """Run what is inside, which stands for the script's own work, under the script's function modes again, with its tensors.

    Not in a ``backward``, which its tensors do not look into.

    Not under its dispatch modes: what these do besides is not known.
    """
    aside = _aside.get()
    tensors = plain_tensors if backward else _scripts_tensors
    if aside is None:
        with tensors():
            yield
        return
    stack, modes = _STACKS[0], aside[0]
    _back(stack, modes)
    try:
        with tensors():
            yield
    finally:
        _set(stack, [mode for mode in stack[0]() if is_ours(mode)])


def _back(stack: _Stack, modes: list[Any]) -> None:
    """Enter the script's modes again; ours may have been entered or left meanwhile."""
    now = stack[0]()
    _set(stack, [m for m in modes if not is_ours(m) or m in now] + [m for m in now if m not in modes])


def _set(stack: _Stack, modes: list[Any]) -> None:
    read, pop, push = stack
    for _ in read():
        pop()
    for mode in modes:
        push(mode)
