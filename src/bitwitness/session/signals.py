"""SIGTERM while a model is watched: what was recorded reaches the disk, the run says how it ended, and the process ends so.

Only where the script leaves the signal as it is. The process ends by the signal, as it would have, and as its launcher expects.
Python runs a handler when the main thread is back from what it does in C: a launcher's patience (torchrun's: 30 s) has to do.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from bitwitness.session.forked import inert_in_children

_PATIENCE_S = 10.0
"""For everything that is to reach the disk: a third of what torchrun waits before it kills."""


class Termination:
    """Has those who record told of SIGTERM; one for a process, as the signal is."""

    def __init__(self) -> None:
        self._told: list[Callable[[], None]] = []

    @contextmanager
    def told(self, last_words: Callable[[], None]) -> Iterator[None]:
        """Call ``last_words`` where SIGTERM ends the process inside; it may take some seconds, and runs in another thread."""
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
                signal.signal(signal.SIGTERM, self._came)
                inert_in_children(self)

    def _listen_no_more(self) -> None:
        with suppress(ValueError):
            if signal.getsignal(signal.SIGTERM) == self._came:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def after_fork(self, *, worker: bool) -> None:
        """Leave a forked child's signal as it would be."""
        del worker
        self._told.clear()
        self._listen_no_more()

    def _came(self, number: int, _frame: FrameType | None) -> None:
        told = list(self._told)
        speaking = threading.Thread(target=_all, args=(told,), name="bitwitness-terminated", daemon=True)
        with suppress(RuntimeError):  # no thread can be made any more
            speaking.start()
            speaking.join(_PATIENCE_S)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _all(told: list[Callable[[], None]]) -> None:
    for last_words in reversed(told):
        with suppress(Exception):
            last_words()


TERMINATION = Termination()
"""The process's: a signal has one handler."""
