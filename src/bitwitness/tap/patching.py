"""Replacing an attribute for a while, also where several do so, in several threads, and leave in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_BELOW = "_bitwitness_below"
_one_at_a_time = threading.RLock()


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Put ``wrap(current)`` in an attribute's place.

    On leaving, it goes if it lies on top; else it goes with the last one above it. Until then it should do nothing of its own.
    The new value is a function (or holds one in ``__func__``), on which a note is kept of what it replaced.
    """
    with _one_at_a_time:
        original = owner.__dict__[name] if name in vars(owner) else getattr(owner, name)
        ours = wrap(original)
        note = getattr(ours, "__func__", ours)
        setattr(owner, name, ours)
    try:
        yield
    finally:
        with _one_at_a_time:
            setattr(note, _BELOW, original)  # from now on it is dead
            top = owner.__dict__[name]
            while hasattr(function := getattr(top, "__func__", top), _BELOW):
                top = getattr(function, _BELOW)
            if top is not owner.__dict__[name]:
                setattr(owner, name, top)
