"""The roll call: who is named, by whom, in what words, and that nobody waits for a store that went silent."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from bitwitness import rollcall
from bitwitness.rollcall import Progress, Roll, RollCall, store_host

KEEPER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(rollcall, "_ANSWER_S", 0.6)
    monkeypatch.setattr(rollcall, "_GIVE_UP_S", 1.2)


@pytest.fixture
def store() -> dist.Store:
    return dist.PrefixStore("guard", dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), False))


def join(store: dist.Store, size: int, present: list[int], host: int | None = None) -> list[RollCall]:
    return [RollCall(store, rank, size, host=host, progress=Progress()) for rank in present]


def close(calls: list[RollCall]) -> None:
    for call in calls:
        call.close()


def test_the_absent_are_named_and_all_ranks_hear_the_same(store) -> None:
    calls = join(store, 4, [0, 1, 3])
    found: list[Roll] = []
    threads = [threading.Thread(target=lambda c=call: found.append(c.call())) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Roll(absent=(2,))] * 3
    assert str(found[0]) == "rank 2 does not answer"
    close(calls)


def test_who_asks_later_gets_the_answer_that_counts(store) -> None:
    calls = join(store, 3, [0, 1])
    assert calls[0].call() == Roll(absent=(2,))
    close(calls[:1])  # it ended meanwhile
    assert calls[1].call() == Roll(absent=(2,))
    close(calls[1:])


def test_a_busy_rank_that_others_wait_for_is_late_and_not_absent(store) -> None:
    ahead, behind = Progress(), Progress()
    ahead.begun, ahead.waiting, behind.begun = 5, True, 4
    calls = [RollCall(store, rank, 3, host=None, progress=p) for rank, p in enumerate((ahead, behind, ahead))]
    roll = calls[0].call()
    assert roll == Roll(late=(1,))
    assert str(roll) == "rank 1 answers, but had not come to where the others waited"
    close(calls)


def test_in_passing_it_can_be_called_again(store) -> None:
    calls = join(store, 2, [0, 1])
    for caller in (0, 1, 0):
        assert calls[caller].call(final=False) == Roll()
    assert str(calls[1].call()) == "every rank still answers"
    close(calls)


def test_a_rank_that_none_answers_does_not_blame_the_rest(store) -> None:
    calls = join(store, 3, [1])
    assert "this one was away for too long, or is cut off" in str(calls[0].call())
    close(calls)


def test_closing_without_a_call_ends_the_thread(store) -> None:
    before = threading.active_count()
    calls = join(store, 2, [0, 1])
    close(calls)
    assert threading.active_count() == before


@pytest.fixture
def keeper() -> Iterator[tuple[subprocess.Popen[str], dist.Store]]:
    process = subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    yield process, dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), False)
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize(("host", "words"), [(0, "rank 0 does not answer"), (None, "launcher's store does not answer")])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_went_silent_holds_nobody(keeper, host, words, how) -> None:
    process, store = keeper
    calls = join(store, 3, [1], host=host)
    time.sleep(0.1)  # it waits in the store by now
    process.send_signal(how)
    started = time.monotonic()
    assert words in str(calls[0].call())
    close(calls)
    assert time.monotonic() - started < 10


def test_the_keeper_of_the_store(monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert store_host([0, 1, 2]) == 0
    assert store_host([4, 5]) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert store_host([0, 1, 2]) is None
