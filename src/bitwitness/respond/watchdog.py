"""Work that the guard makes in the training's own collectives, and that must not wait for a lost rank as long as those do.

The training's groups wait for minutes (gloo: 30, NCCL: 10), inside C++, where no Python exception reaches. What the
training does is its own affair; a lockstep replay is ours, and all ranks are known to be in it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bitwitness.errors import EXIT_RANK_LOST, SideChannelError
from bitwitness.ranks import Ranks
from bitwitness.session.reporter import Reporter


class Watchdog:
    """Ends this process where a lockstep replay waits for a rank that does not answer.

    While every rank answers it lets the replay go on, however long it takes.

    Parameters
    ----------
    ranks, reporter
        Who is asked, and where it is said.
    deadline_s
        Seconds after which liveness is checked, and checked again.

    """

    def __init__(self, ranks: Ranks, reporter: Reporter, deadline_s: float) -> None:
        self._ranks = ranks
        self._reporter = reporter
        self._deadline_s = deadline_s

    @contextmanager
    def over(self, step: int) -> Iterator[None]:
        """Watch over this block; costs a thread for as long as it lasts."""
        if self._ranks.size == 1:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done, step), name="bitwitness-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _watch(self, done: threading.Event, step: int) -> None:
        lost = False
        while not lost:
            if done.wait(self._deadline_s):
                return
            found = self._ranks.check_liveness(final=False)
            # A check that does not come to its end: who began it, or who keeps the store, has ended meanwhile.
            lost = bool(found.absent or found.problem)
        if done.is_set():
            return  # the exchange that follows finds the rank lost by itself
        error = SideChannelError(
            f"rank {self._ranks.rank}: a lockstep replay has waited for {self._deadline_s:g} s in the training's collectives"
        )
        self._reporter.rank_lost(error, self._ranks, step)
        self._ranks.close()  # where this process keeps the store, the others still have to read who is lost
        os._exit(EXIT_RANK_LOST)  # the main thread cannot be reached where it waits
