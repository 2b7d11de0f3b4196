"""Several trainings in one process, each in a thread of its own: what one of them does is nothing to the others' guards."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

_PATIENCE_S = 1.0  # for another thread to get through its hooks, which are calls of microseconds as a rule


def _others() -> Iterator[tuple[int, FrameType]]:
    """Yield the other threads of the process, each with its innermost frame."""
    here = threading.get_ident()
    yield from ((thread, frame) for thread, frame in frames().items() if thread != here)


def frames() -> dict[int, FrameType]:
    """Return every thread's innermost frame, without a garbage collection meanwhile.

    Up to Python 3.11.8 one may wait for ever for the lock that the call itself holds (CPython's issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def elsewhere(is_it: Callable[[FrameType | None], bool]) -> bool:
    """Tell whether what another thread runs now, told by its innermost frame, is such."""
    return any(is_it(frame) for _, frame in _others())


def wait_while_elsewhere(is_it: Callable[[FrameType | None], bool]) -> None:
    """Wait for other threads to be at something else, but not for long."""
    until = time.monotonic() + _PATIENCE_S
    while elsewhere(is_it) and time.monotonic() < until:
        time.sleep(0.001)


_LIBRARY = f"{Path(threading.__file__).parent}{os.sep}"
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_WAITS = tuple(
    f"{os.sep}{name}.py"
    for name in ("threading", "queue", "selectors", "socket", "connection", "subprocess", "thread", "popen_fork")
)
"""Files of Python's library in whose functions a thread waits; it goes on when another has done something."""
_PREFETCHES = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}_utils{os.sep}"
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TORCH = f"{os.sep}torch{os.sep}"


def working_elsewhere() -> str | None:
    """Return the name of another thread that runs the script's code, or torch's for it; None if none does.

    Threads of ours, threads that wait, and those in which a library runs nothing but itself do not count.
    """
    working = next((thread for thread, frame in _others() if _works(frame)), None)
    if working is None:
        return None
    return next((one.name for one in threading.enumerate() if one.ident == working), "without a name")


def _works(frame: FrameType | None) -> bool:
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    if not files or (files[0].startswith(_LIBRARY) and files[0].endswith(_WAITS)):
        return False
    started = [file for file in files if file != threading.__file__]
    if started and started[-1].startswith(_OWN):
        return False
    return any(_is_script(file) for file in files)


def _is_script(file: str) -> bool:
    if any(part in file for part in _PACKAGES):
        return _TORCH in file and _PREFETCHES not in file
    return not file.startswith((_LIBRARY, _OWN, "<frozen"))


def is_another_thread(ident: int) -> bool:
    """Tell whether this is a thread of Python's other than one; autograd's own, of an accelerator, work for who called."""
    here = threading.get_ident()
    if here == ident:
        return False
    return any(one.ident == here and not isinstance(one, threading._DummyThread) for one in threading.enumerate())


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
