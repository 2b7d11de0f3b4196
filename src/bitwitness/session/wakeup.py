"""A signal is heard at once, by a thread of its own, whatever the main thread waits for in C.

Python runs a signal's handler when the main thread is back in Python: never, where it is in a collective whose other ranks are
gone. What Python does in C it does at once: it writes the signal's number to a pipe (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from bitwitness.session.forked import still_while_forking

_ENOUGH = 0  # a number that no signal has: the thread is to end


class SignalThread:
    """Calls ``came`` for each signal of a number that has a handler in Python; to be made and closed in the main thread.

    Raises
    ------
    ValueError
        Outside of the main thread.
    OSError
        If somebody else is told of signals already.

    """

    def __init__(self, number: int, came: Callable[[], None]) -> None:
        self._number, self._came = int(number), came
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        try:
            before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except ValueError:
            self._close_pipe()
            raise
        if before != -1:
            signal.set_wakeup_fd(before)
            self._close_pipe()
            raise OSError(f"file descriptor {before} is told of signals already")
        self._thread: threading.Thread | None = None
        still_while_forking(self)
        self.after_fork_here()

    def hears(self) -> bool:
        """Tell whether this is still who is told; in the main thread."""
        now = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if now != self._write:
            signal.set_wakeup_fd(now)
        return now == self._write and self._thread is not None

    def close(self) -> None:
        """Hear no more."""
        if self.hears():
            signal.set_wakeup_fd(-1)
        self.before_fork()
        self._close_pipe()

    def after_fork(self) -> None:
        """Hear nothing in a forked child, whose signals are none of the parent's."""
        self._thread = None
        with suppress(ValueError):
            before = signal.set_wakeup_fd(-1)
            if before != self._write:  # the script's
                signal.set_wakeup_fd(before)
        self._close_pipe()

    def before_fork(self) -> None:
        """End the thread."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            with suppress(OSError):
                os.write(self._write, bytes([_ENOUGH]))
            thread.join()

    def after_fork_here(self) -> None:
        """Begin it, and read what came meanwhile."""
        if self._read < 0:
            return
        thread = threading.Thread(target=self._listen, name="bitwitness-signals", daemon=True)
        with suppress(RuntimeError):  # no thread can be made: the handler hears it, later
            thread.start()
            self._thread = thread

    def _listen(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number == _ENOUGH:
                    return
                if number == self._number:
                    self._came()

    def _close_pipe(self) -> None:
        for end in (self._read, self._write):
            with suppress(OSError):
                os.close(end)
        self._read = self._write = -1
