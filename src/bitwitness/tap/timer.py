"""How long parts of the work take, by the clock that counts for the device; and the clock of files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_REALTIME_COARSE = 5
"""Linux's number of the clock whose last tick files are stamped with (``clock_gettime(2)``), which Python has no name for."""


def file_clock() -> int:
    """Return the time in nanoseconds by the clock of files: one that is written from now on bears this time or a later one.

    It stands still between ticks (4 to 10 ms, and 22 ms were seen on a busy virtual machine).
    """
    return time.clock_gettime_ns(_REALTIME_COARSE)


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Return the clock, in seconds, by which work of a training on ``device`` is measured.

    On a CPU the process's own time: what other processes take there is none of its price. On an accelerator wall clock.
    """
    return time.process_time if device.type == "cpu" else time.perf_counter


class Timer:
    """Adds up what several parts of the work take, in seconds by `stopwatch`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._now = now

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Add what runs inside."""
        started = self._now()
        try:
            yield
        finally:
            self.seconds += self._now() - started
