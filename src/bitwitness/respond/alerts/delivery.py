"""Delivers events to one target, in a thread that lives only while there is something to deliver: nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bitwitness.files.shown import shown
from bitwitness.respond.alerts.targets import Target

_MOST = 64  # events that wait; verdicts are few, and a device that is wrong at every step says the same each time
_PAUSES_S = (0.3, 1.0)  # before the second try and the third


class Delivery:
    """A queue and a target.

    Parameters
    ----------
    target
        Takes events.
    say
        Told once, in the thread that delivers, that an event could not be delivered.
    pauses_s
        Seconds before each further try.

    Attributes
    ----------
    undelivered
        Events that were given up.

    """

    def __init__(self, target: Target, say: Callable[[str], None], pauses_s: Sequence[float] = _PAUSES_S) -> None:
        self._target, self._say, self._pauses = target, say, pauses_s
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._said = False
        self._closed = False
        self.undelivered = 0

    def put(self, event: Mapping[str, Any]) -> None:
        """Have an event delivered; returns at once. Where too many wait it is dropped and counted."""
        with self._changed:
            if self._closed or len(self._waiting) >= _MOST:
                self.undelivered += 1
                return
            self._waiting.append(event)
            if self._busy:
                return
            self._busy = True
        threading.Thread(target=self._work, name="bitwitness alerts", daemon=True).start()

    def close(self, until: float) -> int:
        """Wait for what is left, until a time by `time.monotonic` at the most; return how many events are given up."""
        with self._changed:
            while self._busy and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            self._closed = True
            lost = len(self._waiting) if self._busy else 0
            self.undelivered += lost
            self._waiting.clear()
            self._changed.notify_all()
            return lost

    @property
    def name(self) -> str:
        """What is said of the target."""
        return self._target.name

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._busy = False
                    self._changed.notify_all()
                    return
                event = self._waiting[0]
            problem = self._deliver(event)
            with self._changed:
                if self._closed:  # whoever closed it has counted what was left
                    self._busy = False
                    return
                self._waiting.popleft()
                self.undelivered += problem is not None
            if problem is not None and not self._said:
                self._said = True
                tries = len(self._pauses) + 1
                self._say(
                    f"{shown(self._target.name)} did not take an event in {tries} tries ({shown(problem)}); the training "
                    "goes on, and the run folder has the event. This is said once"
                )

    def _deliver(self, event: Mapping[str, Any]) -> str | None:
        """Try a few times; return why it failed."""
        problem = None
        for pause in (*self._pauses, None):
            try:
                self._target.deliver(event)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                return None
            with self._changed:
                if pause is None or self._closed:
                    break
                self._changed.wait(pause)
        return problem
