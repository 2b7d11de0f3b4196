"""The liveness check: who is named, by whom, in what words, and that nobody waits for a store that went silent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from bitwitness import liveness
from bitwitness.liveness import Liveness, LivenessCheck, Progress, store_host

KEEPER = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in sys.stdin:
    if not os.fork():
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        print(os.getpid(), store.port, flush=True)
        time.sleep(300)
        os._exit(0)
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(liveness, "_ANSWER_S", 0.6)
    monkeypatch.setattr(liveness, "_GIVE_UP_S", 1.2)


@pytest.fixture
def store() -> dist.Store:
    return dist.PrefixStore("guard", dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), False))


def join(store: dist.Store, size: int, present: list[int], host: int | None = None) -> list[LivenessCheck]:
    return [LivenessCheck(store, rank, size, host=host, progress=Progress()) for rank in present]


def close(checks: list[LivenessCheck]) -> None:
    for check in checks:
        check.close()


def test_the_absent_are_named_and_all_ranks_hear_the_same(store) -> None:
    checks = join(store, 4, [0, 1, 3])
    found: list[Liveness] = []
    threads = [threading.Thread(target=lambda c=check: found.append(c.check())) for check in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Liveness(absent=(2,))] * 3
    assert str(found[0]) == "rank 2 does not answer"
    close(checks)


def test_who_asks_later_gets_the_answer_that_counts(store) -> None:
    checks = join(store, 3, [0, 1])
    assert checks[0].check() == Liveness(absent=(2,))
    close(checks[:1])  # it ended meanwhile
    assert checks[1].check() == Liveness(absent=(2,))
    close(checks[1:])


def test_a_busy_rank_that_others_wait_for_is_late_and_not_absent(store) -> None:
    ahead, behind = Progress(), Progress()
    ahead.begun, ahead.waiting, behind.begun = 5, True, 4
    checks = [LivenessCheck(store, rank, 3, host=None, progress=p) for rank, p in enumerate((ahead, behind, ahead))]
    told = checks[0].check()
    assert told == Liveness(late=(1,))
    assert str(told) == "rank 1 answers, but had not come to where the others waited"
    close(checks)


def test_in_passing_it_can_be_called_again(store) -> None:
    checks = join(store, 2, [0, 1])
    for asking in (0, 1, 0):
        assert checks[asking].check(final=False) == Liveness()
    assert str(checks[1].check()) == "every rank still answers"
    close(checks)


def test_a_rank_that_none_answers_does_not_blame_the_rest(store) -> None:
    checks = join(store, 3, [1])
    assert "this one was away for too long, or is cut off" in str(checks[0].check())
    close(checks)


def test_closing_without_a_check_ends_the_thread(store) -> None:
    before = threading.active_count()
    checks = join(store, 2, [0, 1])
    close(checks)
    assert threading.active_count() == before


@pytest.fixture(scope="module")
def keepers() -> Iterator[subprocess.Popen[str]]:
    """A process that forks another, which keeps a store, for each line that it is given."""
    command = [sys.executable, "-c", KEEPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.fixture
def keeper(keepers) -> Iterator[tuple[int, dist.Store]]:
    keepers.stdin.write("\n")
    keepers.stdin.flush()
    pid, port = map(int, keepers.stdout.readline().split())
    yield pid, dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), False)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("host", "words"), [(0, "rank 0 does not answer"), (None, "launcher's store does not answer")])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_went_silent_holds_nobody(keeper, host, words, how) -> None:
    pid, store = keeper
    checks = join(store, 3, [1], host=host)
    time.sleep(0.1)  # it waits in the store by now
    os.kill(pid, how)
    started = time.monotonic()
    assert words in str(checks[0].check())
    close(checks)
    assert time.monotonic() - started < 10


def test_the_keeper_of_the_store(monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert store_host([0, 1, 2]) == 0
    assert store_host([4, 5]) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert store_host([0, 1, 2]) is None
