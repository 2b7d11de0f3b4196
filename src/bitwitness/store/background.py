"""A thread that writes while the training goes on: jobs from a bounded queue, one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_QUEUE_BYTES = 512 << 20
"""What may wait for the disk. Where that is full the training waits, too: a recording with gaps could not be compared."""


class _Job(NamedTuple):
    """What the thread is to do; ``size``: bytes that it holds; ``always``: also when nothing is written any more."""

    size: int
    action: Callable[[], None]
    always: bool = False


_OWN = "a defect of bitwitness itself"


def advice(problem: str) -> str:
    """Return what is to be done about what ended a writer."""
    return "Please report it" if _OWN in problem else "Free the space or give another --out"


class Background:
    """Does one writer's jobs on a thread of its own, until one fails.

    Parameters
    ----------
    name
        The thread's.
    folder
        Where it writes; named where an error names no file.
    last
        Writes what is left; done at `flush` and at the end.
    failed
        Told once, from the thread, why writing ended.
    broke
        Called before that: to let go of what is half written.

    Attributes
    ----------
    broken
        Why nothing is written any more, or None.

    """

    def __init__(
        self,
        name: str,
        folder: Path,
        last: Callable[[], None],
        failed: Callable[[str], None],
        broke: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._last = last
        self._failed = failed
        self._broke = broke
        self.broken: str | None = None
        self._jobs: deque[_Job] = deque()
        self._waiting = 0
        self._change = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def put(self, action: Callable[[], None], *, size: int = 0) -> None:
        """Have something done; ``size``: bytes that wait with it."""
        self._put(_Job(size, action))

    def flush(self) -> None:
        """Have everything so far written, and wait for it."""
        done = threading.Event()
        self._put(_Job(0, self._last))
        self._put(_Job(0, done.set, always=True))
        while not done.wait(0.1):
            if not self._thread.is_alive():
                return

    def close(self) -> None:
        """Write what is left, and end the thread."""
        with self._change:
            self._ending = True
            self._change.notify_all()
        self._thread.join()

    def _put(self, job: _Job) -> None:
        with self._change:
            if self._ending:
                return
            # What is larger than the queue waits until it is alone.
            while self._waiting and self._waiting + job.size > _QUEUE_BYTES and self._thread.is_alive():
                self._change.wait(0.1)
            self._waiting += job.size
            self._jobs.append(job)
            self._change.notify_all()

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._jobs and not self._ending:
                    self._change.wait()
                if not self._jobs:
                    break
                job = self._jobs.popleft()
            self._run(job)
            with self._change:
                self._waiting -= job.size
                self._change.notify_all()
        self._run(_Job(0, self._last))

    def _run(self, job: _Job) -> None:
        if self.broken is not None and not job.always:
            return
        try:
            job.action()
        except OSError as error:
            self._break(f"{error.strerror or error} ({error.filename or self._folder})")
        except Exception as error:  # writing must not end the training, whatever is wrong with it
            self._break(f"{type(error).__name__}: {error} ({_OWN})")

    def _break(self, problem: str) -> None:
        self.broken = problem
        with suppress(Exception):
            self._broke()
        with suppress(Exception):
            self._failed(problem)
