"""How long parts of the work take, by the clock that counts for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


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
