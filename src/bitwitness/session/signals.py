"""SIGTERM while a model is watched: what was recorded reaches the disk, the run says how it ended, and the process ends so.

Only where the script leaves the signal as it is. The process ends by the signal, as it would have, and as its launcher expects.
It is heard in a thread of its own (`session/wakeup.py`): Python runs a handler when the main thread is back from what it does
in C, and a collective whose other ranks are gone does not come back. Where somebody else is told of signals (asyncio's loop),
the handler has to do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from bitwitness.session.forked import inert_in_children
from bitwitness.session.wakeup import SignalThread

_PATIENCE_S = 10.0
"""For everything that is to reach the disk: a third of what torchrun waits before it kills."""


class Termination:
    """Has those who record told of SIGTERM; one for a process, as the signal is."""

    def __init__(self) -> None:
        self._told: list[Callable[[], None]] = []
        self._thread: SignalThread | None = None

    @contextmanager
    def told(self, last_words: Callable[[], None]) -> Iterator[None]:
        """Call ``last_words`` where SIGTERM ends the process inside; it may take some seconds, in a thread of its own."""
        self._told.append(last_words)
        self._listen()
        try:
            yield
        finally:
            with suppress(ValueError):  # a fork has forgotten it
                self._told.remove(last_words)
            if not self._told:
                self._listen_no_more()

    def _listen(self) -> None:
        with suppress(ValueError):  # not in the main thread
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._handle)
                inert_in_children(self)
                with suppress(OSError):
                    self._thread = SignalThread(signal.SIGTERM, self._heard)

    def _listen_no_more(self) -> None:
        with suppress(ValueError):
            if self._thread is not None:
                self._thread.close()
                self._thread = None
            if self._is_ours():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def after_fork(self, *, worker: bool) -> None:
        """Leave a forked child's signal as it would be."""
        del worker
        self._told.clear()
        if self._thread is not None:
            self._thread.after_fork()
            self._thread = None
        self._listen_no_more()

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not (self._thread is not None and self._thread.hears() and self._is_ours()):
            self._came()

    def _heard(self) -> None:
        """Begin to end, in the thread; not where the script handles the signal by now, and may call `_handle` from there."""
        if self._is_ours():
            self._came()

    def _is_ours(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _came(self) -> None:
        """Begin to end: the main thread goes on meanwhile, since it may hold a lock that the last words need."""
        told, self._told = self._told, []
        speaking = threading.Thread(target=_end, args=(told,), name="bitwitness-terminated", daemon=True)
        try:
            speaking.start()
        except RuntimeError:  # no thread can be made any more
            _die()


def _end(told: list[Callable[[], None]]) -> None:
    later = threading.Timer(_PATIENCE_S, _die)
    later.daemon = True
    later.start()
    for last_words in reversed(told):
        with suppress(Exception):
            try:
                last_words()
            except RuntimeError:  # the training changed a dictionary that was being read
                last_words()
    _die()


def _die() -> None:
    """End by the signal, from whatever thread: Python lets the main thread alone give it back to the system."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


TERMINATION = Termination()
"""The process's: a signal has one handler."""
