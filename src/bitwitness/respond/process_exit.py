"""How a process gets an exit code that nothing in it can change any more.

Python has no hook for that: what runs "at exit" in the order of its registration cannot know whether the script's own
handlers come after it, and ending the process there would cut off those, and files that Python closes last. So C's own list
is used, which is gone through when Python has finished; where it cannot be reached, Python's.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from bitwitness.errors import TrainingStopped
from bitwitness.tap.threads import frames

GRACE_S = 60.0
"""Seconds that a main thread has to end, after the training was stopped in another thread."""

_CLOSING_S = 5.0  # for the run folder's last lines, before the process ends with threads of the script's still running
_LAST = -1_000_000  # among the finalizers of a process started by multiprocessing
_ENDED_BY_LAUNCHER = ("popen_fork.py", "forkserver.py")


def interactive() -> bool:
    """Tell whether a person sits at this process (a notebook, a prompt): it is not to be ended under their hands."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return ask() is not None or hasattr(sys, "ps1") or bool(sys.flags.inspect)


def end_now(code: int, why: str = "", close: Callable[[], None] | None = None) -> NoReturn:
    """End the process at once, from whatever thread; only what was printed and logged is seen to.

    ``close`` is called before, and may take `_CLOSING_S`.
    """
    if close is not None:
        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        closing.join(_CLOSING_S)
    with suppress(Exception):
        if why:
            sys.stderr.write(f"bitwitness: {why}; this process ends now, with exit code {code}\n")
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def seal(code: int) -> None:
    """Have the process end with ``code``, however it ends; until then it may take its time, and clean up as it likes."""
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _end_child, (code,), exitpriority=_LAST)
    if not _seal_in_c(code):
        atexit.register(end_now, code)


def _seal_in_c(code: int) -> bool:
    """Put ``fflush(NULL)`` and ``_exit(code)`` in front of what C does at the exit; return whether that was possible."""
    try:
        libc = ctypes.CDLL(None)
        register = libc["__cxa_atexit"]  # calls a function with one argument: just what `_exit` and `fflush` take
        register.argtypes = [ctypes.c_void_p] * 3
        # The latest comes first.
        done = [register(ctypes.cast(libc["_exit"], ctypes.c_void_p), code, None)]
        done.append(register(ctypes.cast(libc["fflush"], ctypes.c_void_p), None, None))
    except (OSError, AttributeError, TypeError, ctypes.ArgumentError):
        return False
    return not done[0]


def _end_child(code: int) -> None:
    """End a process whose launcher calls ``os._exit`` by itself, so that C's list is never gone through."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_ENDED_BY_LAUNCHER):
            end_now(code)
        frame = frame.f_back


def end_from_elsewhere(code: int, reason: str, where: str, close: Callable[[], None], patience: float = 0.0) -> None:
    """Interrupt the main thread, because the training was stopped elsewhere; end it after `GRACE_S`, if it goes on.

    An interrupt that the script does not catch then ends the process with ``code``, and shows no traceback.

    Parameters
    ----------
    code, reason
        The stop's.
    where
        The thread or process in which it was.
    close
        Called before this process is ended from here.
    patience
        Seconds that the main thread has to notice by itself.

    """
    if patience <= 0:
        _interrupt(code, reason, where)
    else:
        with suppress(Exception):
            sys.stderr.write(f"bitwitness: the training was stopped in {where}, and so it is here: {reason}\n")
        later(patience, _interrupt, code, reason, where)
    why = f"the training was stopped {GRACE_S:g} s ago, and the main thread goes on"
    later(GRACE_S, end_now, code, why, close)


def let_end(thread: threading.Thread) -> None:
    """Have Python wait at the exit until ``thread``, in which the training was stopped, has cleaned up and is gone.

    ``join`` does not do: before Python 3.13, a join that an interrupt ends takes the thread for ended, and so does the exit
    after it. Python then kills the thread at its next step, and with it the process (``std::terminate``) if it is in C++.
    """
    atexit.register(_await, thread, GRACE_S if not thread.daemon else _CLOSING_S)


def _await(thread: threading.Thread, at_most: float) -> None:
    """Wait for a thread: for its frames, and where the system tells (Linux) for what C++ clears after them."""
    until = time.monotonic() + at_most
    task = Path(f"/proc/self/task/{thread.native_id}")
    while time.monotonic() < until and (thread.ident in frames() or task.exists()):
        time.sleep(0.005)


def _interrupt(code: int, reason: str, where: str) -> None:
    with suppress(Exception):
        sys.stderr.write(
            f"bitwitness: the training was stopped in {where}; the main thread is interrupted, and has {GRACE_S:g} s to "
            f"end with exit code {code}\n"
        )
    _name_interrupts(code, reason)
    main = threading.main_thread()
    if main.is_alive() and main.ident is not None and callable(signal.getsignal(signal.SIGINT)):
        if hasattr(signal, "pthread_kill"):  # a signal that is real also wakes a thread that waits
            signal.pthread_kill(main.ident, signal.SIGINT)
        else:
            _thread.interrupt_main()


def later(seconds: float, call: Callable[..., object], *args: object) -> None:
    """Call something in a thread that keeps no process alive."""
    timer = threading.Timer(seconds, call, args)
    timer.daemon = True
    timer.start()


def _name_interrupts(code: int, reason: str) -> None:
    """Have an uncaught interrupt end the process as the stop does: python would end it by the signal."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            raise TrainingStopped(code, reason)  # python takes a SystemExit from here for the script's own
        shown(kind, error, trace)

    sys.excepthook = hook
