"""From single anomalies to a checksum: the strike rule of the reference systems' combined scheme.

A rank counts its anomalies. Enough of them in the window are a strike-out: then *every* rank turns the
checksum on for a while, and a rank whose checksum fires is the faulty one. This is one rank's state; what is
to be known of all ranks is given to it by its caller, who asks the ranks:

    rule.anomaly()                                    where this rank's feature value strikes
    if any_rank(rule.struck_out):                     once a step
        rule.open_window()
    if rule.window_ended:
        result = rule.close_window(any_rank(rule.fired))

All times are in minutes, from a clock that may be any that rises.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from bitwitness.config import StrikesConfig


class Strikes:
    """Counts one rank's anomalies and times the checksum windows.

    Parameters
    ----------
    config
        Cooldown, number and window of strikes, rest between checksum windows.
    clock
        Returns seconds. Ranks need no common clock, as long as their windows open at the same call.

    """

    def __init__(self, config: StrikesConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._strikes: deque[float] = deque()
        self._counted_at: float | None = None
        self._opened_at: float | None = None
        self._closed_at: float | None = None
        self._fired = False

    def anomaly(self) -> bool:
        """Count an anomaly, unless it belongs to the last one; return whether it is counted.

        It is not within ``cooldown`` of the last counted one, nor while the checksum is on.
        """
        now = self._now()
        if self.checksum_on or self._within(self._config.cooldown, self._counted_at, now):
            return False
        self._counted_at = now
        self._strikes.append(now)
        return True

    @property
    def count(self) -> int:
        """Counted anomalies that are still in the window of strikes."""
        oldest = self._now() - self._config.strikes_window
        while self._strikes and self._strikes[0] < oldest:
            self._strikes.popleft()
        return len(self._strikes)

    @property
    def struck_out(self) -> bool:
        """Whether this rank asks for a checksum window now.

        It does not while one is on, nor within ``checksum_cooldown`` of the last one.
        """
        if self.checksum_on or self._within(self._config.checksum_cooldown, self._closed_at, self._now()):
            return False
        return self.count >= self._config.strikes_num

    @property
    def checksum_on(self) -> bool:
        """Whether a checksum window is open."""
        return self._opened_at is not None

    @property
    def window_ended(self) -> bool:
        """Whether the open window has lasted for ``cooldown``, so that it is time to `close_window`."""
        return self.checksum_on and not self._within(self._config.cooldown, self._opened_at, self._now())

    @property
    def fired(self) -> bool:
        """Whether a checksum failed on this rank in the open window."""
        return self._fired

    def open_window(self) -> None:
        """Turn the checksum on, because some rank has struck out. A window that is open stays as it is."""
        if not self.checksum_on:
            self._opened_at = self._now()
            self._fired = False

    def checksum_failed(self) -> None:
        """Note that a checksum failed on this rank; outside a window it is not the strike rule's business."""
        self._fired = self._fired or self.checksum_on

    def close_window(self, global_result: bool) -> tuple[bool, bool]:
        """Turn the checksum off, and start anew with no strike.

        Parameters
        ----------
        global_result
            The ranks' `fired`, OR-ed.

        Returns
        -------
        tuple
            Whether this rank is a faulty one, and the global result.

        """
        here = self._fired
        self._closed_at = self._now()
        self._opened_at = None
        self._fired = False
        self._strikes.clear()
        return here, global_result or here

    def _now(self) -> float:
        return self._clock() / 60.0

    @staticmethod
    def _within(minutes: float, since: float | None, now: float) -> bool:
        return since is not None and now - since < minutes
