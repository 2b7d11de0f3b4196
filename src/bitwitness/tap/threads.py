"""Several trainings in one process, each in a thread of its own: what one of them does is nothing to the others' guards."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

_PATIENCE_S = 1.0  # for another thread to get through its hooks, which are calls of microseconds as a rule


def elsewhere(is_it: Callable[[FrameType | None], bool]) -> bool:
    """Tell whether what another thread runs now, told by its innermost frame, is such."""
    here = threading.get_ident()
    return any(is_it(frame) for thread, frame in sys._current_frames().items() if thread != here)


def wait_while_elsewhere(is_it: Callable[[FrameType | None], bool]) -> None:
    """Wait for other threads to be at something else, but not for long."""
    until = time.monotonic() + _PATIENCE_S
    while elsewhere(is_it) and time.monotonic() < until:
        time.sleep(0.001)


class OneAtATime:
    """A lock that a thread may take again, and that is not waited for without end: ranks may wait for one another inside."""

    def __init__(self, patience_s: float = 10.0) -> None:
        self._lock = threading.RLock()
        self._patience_s = patience_s
        self._mine = threading.local()

    def __enter__(self) -> None:
        taken = self._lock.acquire(timeout=self._patience_s)
        self._mine.taken = [*getattr(self._mine, "taken", ()), taken]

    def __exit__(self, *_: object) -> None:
        *self._mine.taken, taken = self._mine.taken
        if taken:
            self._lock.release()


class TrainingThread:
    """The thread that runs a root's forwards.

    Its gradients must not be read from another one, which may let go of them in the middle of that.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def is_here(self) -> None:
        """Say that the root runs in this thread."""
        self._thread = threading.current_thread()

    def is_unknown(self) -> bool:
        """Tell whether no forward of the root has run as yet."""
        return self._thread is None

    def is_another(self) -> bool:
        """Tell whether another thread, which is still there, ran the root last."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()
