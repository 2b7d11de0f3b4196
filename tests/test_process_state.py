"""What a forward changes of the process itself (environment, contexts, open files): a re-execution leaves it as it is."""

from __future__ import annotations

import contextvars
import decimal
import os
import sys

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.testing import EVERY_STEP

STEPS = 6
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


def environment() -> float:
    os.environ["BITWITNESS_TESTS_N"] = str(int(os.environ.get("BITWITNESS_TESTS_N", "0")) + 1)
    return float(os.environ["BITWITNESS_TESTS_N"])


def variable() -> float:
    VARIABLE.set(VARIABLE.get() * 0.5)
    return 1.0 + VARIABLE.get()


def decimals() -> float:
    decimal.getcontext().prec += 1
    return float(decimal.getcontext().prec)


def recursion() -> float:
    sys.setrecursionlimit(sys.getrecursionlimit() + 1)
    return float(sys.getrecursionlimit() - LIMIT)


def file() -> float:
    os.write(FILE, b"x")
    return float(os.lseek(FILE, 0, os.SEEK_CUR))


LIMIT, FILE = sys.getrecursionlimit(), -1


class Net(nn.Module):
    def __init__(self, counted) -> None:
        super().__init__()
        self.l, self.counted = nn.Linear(8, 3), counted

    def forward(self, x):
        return self.l(x) * self.counted()


def train(counted, watch, *, bad=None):
    torch.manual_seed(0)
    net = Net(counted)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    losses = []
    with watch(net, optimizer) as watching:
        for step in range(STEPS):
            loss = net(torch.randn(16, 8)).square().mean() * (float("inf") if step == bad else 1.0)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            if step != bad:
                optimizer.step()
    return losses, watching


class Nothing:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture(params=[environment, variable, decimals, recursion, file], ids=lambda one: one.__name__)
def counted(request, tmp_path, monkeypatch):
    """Return a function that counts, and what makes it begin anew."""

    def begin() -> None:
        os.environ.pop("BITWITNESS_TESTS_N", None)
        VARIABLE.set(1.0)
        decimal.getcontext().prec = 28
        sys.setrecursionlimit(LIMIT)
        if (tmp_path / "file").exists():
            os.close(FILE)
            (tmp_path / "file").unlink()
        monkeypatch.setitem(globals(), "FILE", os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))

    yield request.param, begin
    begin()
    os.close(FILE)


def test_every_step_questioned_counts_once(counted) -> None:
    one, begin = counted
    begin()
    wanted, _ = train(one, Nothing)
    begin()
    found, guard = train(one, lambda *given: bw.Guard(*given, act="protect", **EVERY_STEP))
    assert found == wanted
    assert guard.coverage()["verdicts"] == []


def test_a_first_step_that_is_not_finite_counts_once(counted) -> None:
    one, begin = counted
    begin()
    wanted, _ = train(one, Nothing, bad=0)
    begin()
    found, _ = train(one, bw.NonfiniteTracer, bad=0)
    assert found[1:] == wanted[1:]
