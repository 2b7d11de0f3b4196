"""Torch's modes, and tensors' own ``__torch_function__``: the script's see what the script computes, and nothing of ours.

Functions are kept from all of them by a switch of torch's, which costs nothing; dispatch modes are taken off their stack,
except for bitwitness's own: an emulated device stands beneath our work, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from bitwitness.tap.compat import (
    default_device_mode,
    dispatch_depth,
    dispatch_modes,
    function_modes,
    heard,
    plain_tensors,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    unheard,
)

_aside: ContextVar[list[Any] | None] = ContextVar("bitwitness_dispatch_modes_aside", default=None)


def scripts_modes() -> tuple[list[Any], list[Any]]:
    """Return the function modes and the dispatch modes that the script has entered, also while they are set aside."""
    dispatching = _aside.get() or dispatch_modes()
    return _theirs(function_modes()), _theirs(dispatching)


def mode_in_doubt() -> str | None:
    """Return the class of a dispatch mode of the script's that may make something else of results; None where there is none.

    Torch's own (a FLOP counter) look on.
    """
    for mode in _theirs(_aside.get() or dispatch_modes()):
        if not type(mode).__module__.startswith("torch."):
            return type(mode).__name__
    return None


def is_ours(thing: Any) -> bool:
    """Tell whether a mode, an object, a function or a class is one of bitwitness's."""
    return str(getattr(thing, "__module__", "")).startswith("bitwitness.")


def _theirs(modes: list[Any]) -> list[Any]:
    return [mode for mode in modes if not is_ours(mode)]


def scripts_modes_off() -> AbstractContextManager[None]:
    """Run what is inside under bitwitness's own dispatch modes alone."""
    return _off() if dispatch_depth() else unheard()


@contextmanager
def _off() -> Iterator[None]:
    there = dispatch_modes()
    with unheard():
        if not _theirs(there):
            yield
            return
        token = _aside.set(there) if _aside.get() is None else None
        _set([mode for mode in there if is_ours(mode)])
        try:
            yield
        finally:
            now = dispatch_modes()  # ours may have been entered or left meanwhile
            _set([m for m in there if not is_ours(m) or m in now] + [m for m in now if m not in there])
            if token is not None:
                _aside.reset(token)


@contextmanager
def scripts_modes_back(*, backward: bool = False) -> Iterator[None]:
    """Run what is inside, which stands for the script's own work, under the script's function modes again, with its tensors.

    Not in a ``backward``, which its tensors do not look into, and not under its dispatch modes: what these do besides is not
    known.
    """
    with heard(), plain_tensors() if backward else nullcontext():
        yield


def put_below(mode: Any) -> None:
    """Enter a function mode of ours below all of the script's: each of these, when it is left, pops what it finds on top.

    Only the default device's mode stays below ours: it is found at the bottom when it is changed.
    """
    stack = function_modes()
    if mode in stack:
        return
    default = default_device_mode()
    below = 1 if stack and stack[0] is default else 0
    above = [pop_function_mode() for _ in range(len(stack) - below)]
    push_function_mode(mode)
    for other in reversed(above):
        push_function_mode(other)


def put_at_the_bottom(mode: Any) -> None:
    """Move a dispatch mode that was just entered below all others: each of these, when it is left, takes the one on top."""
    _set([mode, *(other for other in dispatch_modes() if other is not mode)])


def take_out(mode: Any) -> None:
    """Leave a function mode, wherever it stands."""
    above = []
    while mode in function_modes():
        top = pop_function_mode()
        if top is not mode:
            above.append(top)
    for other in reversed(above):
        push_function_mode(other)


@contextmanager
def others_above_aside(mode: Any) -> Iterator[None]:
    """Have a dispatch mode on top inside, as it must be to leave; those above it come back on what is left."""
    modes = dispatch_modes()
    above = modes[modes.index(mode) + 1 :]
    _set(modes[: modes.index(mode) + 1])
    try:
        yield
    finally:
        _set([*dispatch_modes(), *above])


def _set(modes: list[Any]) -> None:
    for _ in range(dispatch_depth()):
        pop_dispatch_mode()
    for mode in modes:
        push_dispatch_mode(mode)
