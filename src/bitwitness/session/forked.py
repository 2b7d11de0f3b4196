"""What a forked child inherits of its parent's guards: nothing that acts, speaks or writes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """What must not go on in a forked child."""

    def after_fork(self, *, worker: bool) -> None:
        """Become inert in the child; ``worker``: ``multiprocessing`` made it, and says itself what runs in it."""


class Listener(Protocol):
    """Something with a thread: a process with threads had better not fork."""

    def before_fork(self) -> None:
        """End the thread."""

    def after_fork_here(self) -> None:
        """Begin it again, in the process that forked."""


_inherited: WeakSet[Inherited] = WeakSet()
_listeners: WeakSet[Listener] = WeakSet()
_kept: list[Inherited] = []  # in a child: what is never freed there, since it would close the parent's connections
_starting = threading.local()
_registered = False


def inert_in_children(owner: Inherited) -> None:
    """Have ``owner`` told in every process that is forked from now on."""
    _inherited.add(owner)
    _register()


@contextmanager
def lent_to_children(owner: Inherited) -> Iterator[None]:
    """Have ``owner`` go on in what is forked meanwhile, and rest here until that ends: for trials that are thrown away."""
    _inherited.discard(owner)
    try:
        yield
    finally:
        _inherited.add(owner)


def still_while_forking(owner: Listener) -> None:
    """Have the thread of ``owner`` ended before every fork of this process, and begun again behind it."""
    _listeners.add(owner)
    _register()


def _register() -> None:
    global _registered  # noqa: PLW0603 - Python knows no way to take such callbacks back, so they are given once
    if not _registered and hasattr(os, "register_at_fork"):
        _registered = True
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


@contextmanager
def starting_worker() -> Iterator[None]:
    """Mark forks of this thread as ``multiprocessing``'s."""
    before, _starting.on = getattr(_starting, "on", False), True
    try:
        yield
    finally:
        _starting.on = before


def _in_child() -> None:
    worker = getattr(_starting, "on", False)
    for owner in list(_inherited):
        _kept.append(owner)
        with suppress(Exception):  # it is the script's own process: our trouble is not its trouble
            owner.after_fork(worker=worker)


def _before() -> None:
    for owner in list(_listeners):
        with suppress(Exception):
            owner.before_fork()


def _in_parent() -> None:
    for owner in list(_listeners):
        with suppress(Exception):
            owner.after_fork_here()
