"""A stop in one process of a family is a stop in all of it: who waits for a child that was stopped would wait for ever.

Each child that is guarded has a line to its parent, on which it says that it was stopped; the line's end is the child's end.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from bitwitness.respond import process_exit
from bitwitness.respond.final import PROCESS, Stop
from bitwitness.session.forked import still_while_forking

PATIENCE_S = 10.0
"""Seconds that a process has to notice by itself that a child was stopped, and that children have after their parent's end."""


@dataclass(eq=False)
class _Line:
    """The parent's end of a line."""

    process: BaseProcess
    ear: Any
    stopped: bool = False


class ChildStops:
    """Hears which children of this process were stopped, and sees to it that none outlives a stop of their parent.

    It listens in a thread, which is never there while the process forks.

    Parameters
    ----------
    say
        Told what is done to whom.

    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lines: list[_Line] = []
        self._thread: threading.Thread | None = None
        self._wakes, self._wake = multiprocessing.Pipe(duplex=False)
        self._owner = os.getpid()
        self._closed = False
        still_while_forking(self)
        PROCESS.also(self._stopped)

    def line(self) -> tuple[Connection, Connection]:
        """Return the parent's and the child's end of a new line."""
        return multiprocessing.Pipe(duplex=False)

    def listen(self, process: BaseProcess, ear: Connection) -> None:
        """Listen to a child that has been started."""
        self.before_fork()
        self._lines.append(_Line(process, ear))
        self.after_fork_here()

    def close(self) -> None:
        """Take no more children; who goes on is listened to until its end."""
        self._closed = True
        if os.getpid() == self._owner and self._lines:
            return
        self._release()

    def _release(self) -> None:
        PROCESS.no_more(self._stopped)
        for end in (*(line.ear for line in self._lines), self._wakes, self._wake):
            end.close()
        self._lines.clear()

    # -- the thread ----------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Let the thread end."""
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return
        self._wake.send(None)
        thread.join()
        self._wakes.recv()

    def after_fork_here(self) -> None:
        """Listen on, in the process that forked."""
        if self._lines and self._thread is None and os.getpid() == self._owner:
            self._thread = threading.Thread(target=self._listen, name="bitwitness children", daemon=True)
            self._thread.start()

    def _listen(self) -> None:
        while self._lines:
            ready = wait([line.ear for line in self._lines] + [self._wakes])
            if self._wakes in ready:
                return
            for line in [line for line in self._lines if line.ear in ready]:
                self._hear(line)
        self._thread = None
        if self._closed:
            self._release()

    def _hear(self, line: _Line) -> None:
        try:
            code, reason = line.ear.recv()
        except (EOFError, OSError):
            line.ear.close()
            self._lines.remove(line)
            return
        line.stopped = True
        PROCESS.declare_for(Stop(code, reason), f"process {line.process.name}", PATIENCE_S)

    # -- the end -------------------------------------------------------------------------------------------------

    def _stopped(self, _stop: Stop) -> None:
        """See to it that no child goes on for long after a stop of this process."""
        if not self._lines or os.getpid() != self._owner:
            return
        atexit.register(self._end_all, PATIENCE_S)  # runs before multiprocessing waits for them without limit
        process_exit.later(process_exit.GRACE_S, self._end_all)

    def _end_all(self, patience: float = 0.0) -> None:
        """End the children that go on; one that was stopped itself cleans up for as long as it likes."""
        for line in list(self._lines):
            if line.stopped or os.getpid() != self._owner:
                continue
            with suppress(Exception):
                line.process.join(patience)
                if line.process.exitcode is None:
                    line.process.terminate()
                    self._say(f"the training was stopped; its process {line.process.name} went on, and was ended")


def telling(mouth: Connection) -> Callable[[Stop], None]:
    """Return what says a stop of this process on the child's end of a line."""

    def tell(stop: Stop) -> None:
        with suppress(OSError):
            mouth.send((stop.code, stop.reason))

    return tell
