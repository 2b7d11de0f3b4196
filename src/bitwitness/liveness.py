"""Who still answers: asked through the training's store, answered by a thread of each rank's own.

A rank that died or is stopped does not answer; one that is in a long evaluation, in a replay, or waits in a collective,
does. The thread sleeps in the store until a liveness check begins, so that it costs a training nothing. Nothing here blocks its
caller for long, not even where the process that keeps the store is itself the one that is gone.

A check may be made in passing, to see whether all ranks live; or it is the final one, after the side channel broke. A final
one, and any that found a rank absent, is the last, and whoever asks later gets its result. (Others may have ended by then.)
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_ANSWER_S = 4.0
"""How long a rank may take to answer. Its thread needs milliseconds in the store, but also the interpreter's lock, which a rank
that copies a large batch or loads a library may hold for a while. Longer would only delay the end of a training that
has lost a rank; shorter would name a rank that lives."""
_GIVE_UP_S = 1.5 * _ANSWER_S
"""How long one waits for a result: the rank that counts takes all of `_ANSWER_S`, and may have begun a little later."""
_SLOW_S = 1.5
"""From when on an answer is told as late: a rank that was stopped, and came back while it was asked for."""
_POLL_S = 0.02  # between two looks at the store: short beside `_ANSWER_S`, and some fifty requests a second
_JOIN_S = 1.0
"""How long to wait for the own threads at the end; for `_ANSWER_S` on the rank that keeps the store, where others read."""
_AWAY = "no other rank answers: this one was away for too long, or is cut off"
_FOREVER = timedelta(days=10_000)


@dataclass(frozen=True, slots=True)
class Liveness:
    """What a liveness check found.

    Attributes
    ----------
    absent
        Ranks that did not answer.
    late
        Ranks that answered while they were busy elsewhere, and that others waited for in an exchange.
    problem
        Why no rank can be named, if so.

    """

    absent: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        if self.absent:
            return f"{_ranks(self.absent)} does not answer"
        if self.late:
            return f"{_ranks(self.late)} answers, but had not come to where the others waited"
        return self.problem or "every rank still answers"


class Progress:
    """How far a rank has come, for others to compare: exchanges of all ranks begun, and whether it waits in one now."""

    def __init__(self) -> None:
        self.begun = 0
        self.waiting = False


def _connection(store: Any) -> Any:
    """Return a connection of our own to a store, or, should it have only one, the store itself."""
    try:
        return store.clone()
    except (RuntimeError, AttributeError, NotImplementedError):
        return store


class LivenessCheck:
    """Asks which of one guard's ranks still answer, and answers for this one.

    Parameters
    ----------
    store
        A store of this guard alone (prefixed), the same on all ranks.
    rank, size
        Who answers, and how many there are.
    host
        The rank whose process keeps the store; None if a launcher's agent does.
    progress
        Of this rank; read when a check asks for it.

    """

    def __init__(self, store: Any, rank: int, size: int, *, host: int | None, progress: Progress) -> None:
        # Two connections of our own: one waits, and what blocks on a store that went silent must not block the training's.
        self._store = _connection(store)
        self._rank = rank
        self._size = size
        self._host = host
        self._progress = progress
        self._closed = False
        self._asked_here = False
        self._over = False
        self._beginning: threading.Thread | None = None
        self._round = 0
        self._found: Liveness | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._answer_all, args=(_connection(store),), name="bitwitness-liveness", daemon=True
        )
        self._thread.start()

    def check(self, *, final: bool = True) -> Liveness:
        """Begin a check, or join the one that another rank began; return what it found within some seconds.

        All ranks get the same result: the first one to ask counts the answers.
        """
        self._asked_here |= final
        started = time.monotonic()
        end = started + _GIVE_UP_S
        while not self._over and time.monotonic() < end:
            number = self._round
            self._beginning = threading.Thread(
                target=self._begin, args=(number, final), name="bitwitness-liveness-check", daemon=True
            )
            self._beginning.start()
            if self._await(number, end) and not final:
                break
        found = self._found or self._store_is_gone()
        if found == Liveness() and self._host not in (None, self._rank) and time.monotonic() - started > _SLOW_S:
            return Liveness(late=self._store_is_gone().absent)  # it came back while the check went on
        return found

    def _await(self, number: int, end: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._over or self._round > number, end - time.monotonic())

    def close(self) -> None:
        """End the threads: one that comes back from the store while the interpreter ends would abort the process."""
        if not self._asked_here:
            self._closed = True
            with suppress(Exception):
                self._store.set(f"{self._round}/asked/{self._rank}", "")
        for thread in (self._thread, self._beginning):
            if thread is not None:
                thread.join(_ANSWER_S if self._host == self._rank else _JOIN_S)

    def _begin(self, number: int, final: bool) -> None:
        with suppress(Exception):  # no store, no answer: `check` gives up by itself
            if final:
                self._store.set("final", "")
            if self._store.add(f"{number}/asking", 1) == 1:
                self._store.set(f"{number}/counting", str(self._rank))
                for rank in range(self._size):
                    self._store.set(f"{number}/asked/{rank}", "")

    def _answer_all(self, store: Any) -> None:
        over = False
        while not over:
            found, over = self._answer(store, self._round)
            with self._changed:
                self._found, self._over = found, over
                self._round += 1
                self._changed.notify_all()
        if self._host == self._rank and not self._closed:
            with suppress(Exception):
                self._linger(store)

    def _answer(self, store: Any, number: int) -> tuple[Liveness | None, bool]:
        """Answer one check; return what it found, and whether it was the last."""
        asked = False
        try:
            store.wait([f"{number}/asked/{self._rank}"], _FOREVER)
            asked = True
            if self._closed:
                return None, True
            store.set(f"{number}/here/{self._rank}", json.dumps([self._progress.begun, self._progress.waiting]))
            if int(store.get(f"{number}/counting")) == self._rank:
                found = self._count(store, number)
                store.set(f"{number}/result", json.dumps([found.absent, found.late, found.problem]))
            else:
                store.wait([f"{number}/result"], timedelta(seconds=2 * _ANSWER_S))
                absent, late, problem = json.loads(store.get(f"{number}/result"))
                found = Liveness(tuple(absent), tuple(late), problem)
            store.add(f"{number}/heard", 1)
            return found, bool(found.absent) or store.check(["final"])
        except dist.DistNetworkError:
            return (Liveness(problem=_AWAY) if asked else self._store_is_gone()), True
        except Exception:
            return Liveness(problem="the rank that began the liveness check did not live to tell"), True

    def _count(self, store: Any, number: int) -> Liveness:
        """Wait until all ranks answered or time is over; tell the absent and the late from the rest."""
        started = time.monotonic()
        absent, slow = set(range(self._size)), set[int]()
        while absent and time.monotonic() < started + _ANSWER_S:
            here = {rank for rank in absent if store.check([f"{number}/here/{rank}"])}
            slow |= here if time.monotonic() > started + _SLOW_S else set()
            absent -= here
            time.sleep(_POLL_S if absent else 0)
        answers = {r: json.loads(store.get(f"{number}/here/{r}")) for r in range(self._size) if r not in absent}
        reached = max((begun for begun, waiting in answers.values() if waiting), default=0)
        late = slow | {rank for rank, (begun, waiting) in answers.items() if begun < reached and not waiting}
        if 1 < len(absent) == self._size - 1:
            return Liveness(problem=_AWAY)
        return Liveness(tuple(sorted(absent)), tuple(sorted(late)))

    def _store_is_gone(self) -> Liveness:
        """Name the rank that keeps the store, where the store is silent."""
        if self._host is None:
            return Liveness(problem="the launcher's store does not answer")
        return Liveness(problem=_AWAY) if self._host == self._rank else Liveness(absent=(self._host,))

    def _linger(self, store: Any) -> None:
        """Keep the store until the others have read the result: it ends with this process."""
        expected = self._size - len(self._found.absent if self._found else ())
        end = time.monotonic() + _ANSWER_S
        while store.add(f"{self._round - 1}/heard", 0) < expected and time.monotonic() < end:
            time.sleep(_POLL_S)


def store_host(members: list[int]) -> int | None:
    """Return which of a group's ranks (given by their global numbers) keeps the default store, None if none of them."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return members.index(0) if 0 in members else None


def _ranks(numbers: tuple[int, ...]) -> str:
    return f"rank {', '.join(map(str, numbers))}"
