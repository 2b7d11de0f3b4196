"""State that a forward keeps in objects outside the model, in attributes, or in a library: put back, or no more run again.

Each case counts in the forward and lets the result depend on it. Every step is questioned: the training keeps its bits, and
nobody is convicted. What can be put back is run again; what cannot be seen is found out and told.
"""

from __future__ import annotations

import collections
import contextvars
import ctypes
import functools
import itertools
import mmap
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw
from bitwitness.testing import EVERY_STEP

STEPS = 8


class Table(dict):
    pass


class Row(list):
    pass


class Ring(collections.deque):
    pass


class Array(np.ndarray):
    pass


class SignalError(Exception):
    pass


class Slotted(list):
    __slots__ = ("n",)


class Box:
    pass


def counted(thing):
    """Count in an attribute of a thing."""
    thing.n = getattr(thing, "n", 0) + 1
    return thing.n


def attribute_of(make):
    def case(_net):
        thing = make()
        return lambda: counted(thing)

    return case


def of_tensor(net):
    tensor = torch.zeros(1)
    return lambda: counted(tensor) + 0 * len(list(net.children()))


def of_parameter(net):
    return lambda: counted(net.a.weight)


def of_buffer(net):
    return lambda: counted(net.steps)


def in_a_buffers_gradient(net):
    net.steps.grad = torch.zeros(1)

    def count():
        net.steps.grad.add_(1)
        return float(net.steps.grad)

    return count


def frozen_parameter(_net):
    outside = [nn.Parameter(torch.zeros(1), requires_grad=False)]

    def count():
        with torch.no_grad():
            outside[0].add_(1)
        return float(outside[0])

    return count


def norm_in_a_list(_net):
    teachers = [nn.Sequential(nn.BatchNorm1d(4))]

    def count():
        teachers[0](torch.arange(8.0).reshape(2, 4))
        return float(teachers[0][0].running_mean.sum())

    return count


def target_that_follows(net):
    targets = {"target": nn.Linear(8, 16)}

    def count():
        with torch.no_grad():
            for mine, theirs in zip(targets["target"].parameters(), net.a.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        return float(targets["target"].weight.detach().sum())

    return count


def mode_of_a_module(_net):
    other = [nn.Dropout()]

    def count():
        other[0].train(not other[0].training)
        return int(other[0].training)

    return count


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n: int = 0
        self.seen = torch.zeros(1)

    def forward(self) -> int:
        self.n += 1
        self.seen += 1
        return self.n


def scripted(_net):
    module = torch.jit.script(Counting())
    return lambda: module() + float(module.seen)


def scripted_inside(net):
    net.inner = torch.jit.script(Counting())
    return lambda: net.inner() + float(net.inner.seen)


def quasirandom(_net):
    engine = torch.quasirandom.SobolEngine(1, scramble=True, seed=3)
    return lambda: float(engine.draw(1))


def optimizers_group(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def count():
        optimizer.param_groups[0]["n"] = optimizer.param_groups[0].get("n", 0) + 1
        return optimizer.param_groups[0]["n"]

    return count


def mapped(_net):
    memory = mmap.mmap(-1, 8)

    def count():
        memory[0] = memory[0] + 1
        return memory[0]

    return count


def bound_random(_net):
    return random.Random(3).random


def bound_numpy(_net):
    return np.random.default_rng(3).random


def bound_pop(_net):
    return list(range(100)).pop


RUN_AGAIN = {
    "attribute of a dict": attribute_of(Table),
    "attribute of a list": attribute_of(Row),
    "attribute of a deque": attribute_of(Ring),
    "attribute of an array": attribute_of(lambda: np.zeros(1).view(Array)),
    "attribute of an exception": attribute_of(SignalError),
    "slot of a list": attribute_of(Slotted),
    "attribute of an object in a dict": attribute_of(Box),
    "attribute of a tensor": of_tensor,
    "attribute of a parameter": of_parameter,
    "attribute of a buffer": of_buffer,
    "gradient of a buffer": in_a_buffers_gradient,
    "parameter outside the model": frozen_parameter,
    "norm in a list": norm_in_a_list,
    "target that follows": target_that_follows,
    "mode of a module": mode_of_a_module,
    "scripted module": scripted,
    "scripted module inside": scripted_inside,
    "quasirandom numbers": quasirandom,
    "optimizer's group": optimizers_group,
    "mapped memory": mapped,
    "method of a generator": bound_random,
    "method of numpy's": bound_numpy,
    "method of a list": bound_pop,
}


def library_function(_net):
    library = ctypes.CDLL(None)
    library.srand(5)
    return library.rand


def bound_iterator(_net):
    return itertools.count().__next__


NOT_RUN = {"function of a library": library_function, "method of an iterator": bound_iterator}


class Unseen:
    """Keeps a count where no reader of Python objects looks: in a closure of code that is not the script's."""

    def __init__(self) -> None:
        place: dict = {}
        code = "def make():\n n = [0]\n def tick():\n  n[0] += 1\n  return n[0]\n return tick\n"
        exec(compile(code, "/usr/lib/site-packages/compiled.py", "exec"), place)
        self.tick = place["make"]()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("steps", torch.zeros(1))
        self.scale = 0.05
        self.count = None

    def forward(self, x):
        return self.b(F.gelu(self.a(x)) * (1.0 + self.scale * float(self.count() % 5)))


def train(case, watch=None, scale=0.05, steps=STEPS, kind=Net):
    torch.manual_seed(4)
    net = kind()
    net.scale, net.count = scale, case(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps) if watch is None else watch(net, optimizer, steps):
        optimizer.zero_grad()
        net(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    return net


def guarded(case, told=None, **kwargs):
    guards = []

    def watch(net, optimizer, steps):
        with bw.Guard(net, optimizer, act="protect", deep_every=1, **EVERY_STEP) as guard:
            guards.append(guard)
            guard.reporter.say = (lambda _text: None) if told is None else told.append
            yield from range(steps)

    return train(case, watch, **kwargs), guards[0]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", RUN_AGAIN)
def test_a_count_outside_the_model_is_the_trainings_own(kind: str) -> None:
    net, guard = guarded(RUN_AGAIN[kind])
    found = guard.coverage()
    assert same(net, train(RUN_AGAIN[kind]))
    assert found["verdicts"] == []
    assert found["dismissed"] >= 3


@pytest.mark.parametrize("kind", NOT_RUN)
def test_what_cannot_be_put_back_is_not_run(kind: str) -> None:
    net, guard = guarded(NOT_RUN[kind])
    assert same(net, train(NOT_RUN[kind]))
    assert guard.coverage()["verdicts"] == []


@pytest.mark.parametrize("scale", [0.05, 1e-6])
def test_state_that_nobody_can_see_ends_replays_and_is_told(scale: float) -> None:
    told: list[str] = []
    unseen = Unseen()
    _, guard = guarded(lambda _net: functools.partial(unseen.tick), told, scale=scale, steps=20)
    found = guard.coverage()
    assert found["verdicts"] == []
    assert any("./mul" in line and "works with other values in each re-execution" in line for line in told), told
    assert any("test_held_objects.py" in line and "others since the first one" in line for line in told), told
    assert "works with other values" in found["replay"]["disturbed"]


class Scaled(torch.autograd.Function):
    """Counts when it goes back."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1.0 + 0.05 * float(ctx.count() % 5)), None


class Behind(Net):
    def forward(self, x):
        return self.b(Scaled.apply(F.gelu(self.a(x)), self.count))


COUNT: contextvars.ContextVar[int] = contextvars.ContextVar("count", default=0)


def in_a_context_variable(_net):
    COUNT.set(0)

    def count():
        COUNT.set(COUNT.get() + 1)
        return COUNT.get()

    return count


def in_the_environment(_net):
    os.environ["COUNT_OF_TEST"] = "0"

    def count():
        os.environ["COUNT_OF_TEST"] = str(int(os.environ["COUNT_OF_TEST"]) + 1)
        return int(os.environ["COUNT_OF_TEST"])

    return count


def in_a_file(_net):
    path = Path(tempfile.mkdtemp()) / "count"

    def count():
        number = int(path.read_text()) if path.exists() else 0
        with path.open("w") as file:
            file.write(str(number + 1))
        return number

    return count


BEHIND = {
    "attribute of a list": RUN_AGAIN["attribute of a list"],
    "quasirandom numbers": quasirandom,
    "context variable": in_a_context_variable,
    "environment": in_the_environment,
    "file": in_a_file,
    "iterator": bound_iterator,
}


@pytest.mark.parametrize("kind", BEHIND)
def test_a_count_in_the_backward_is_the_trainings_own(kind: str) -> None:
    net, guard = guarded(BEHIND[kind], kind=Behind)
    assert same(net, train(BEHIND[kind], kind=Behind))
    assert guard.coverage()["verdicts"] == []


def test_an_operator_of_the_scripts_own_that_counts_inside_ends_replays() -> None:
    library = torch.library.Library("held_objects", "DEF")
    library.define("tick(Tensor x) -> Tensor")
    counts = itertools.count(1)
    library.impl("tick", lambda x: x + next(counts), "CPU")
    told: list[str] = []
    _, guard = guarded(lambda _net: lambda: float(torch.ops.held_objects.tick(torch.zeros(()))), told, steps=20)
    assert guard.coverage()["verdicts"] == []
    assert any("/tick" in line and "works with other values in each re-execution" in line for line in told), told


def test_replays_turned_off_run_nothing_again() -> None:
    unseen = Unseen()
    plain = train(lambda _net: unseen.tick, steps=20)
    other = Unseen()

    def watch(net, optimizer, steps):
        with bw.Guard(net, optimizer, deep_every=1, **{**EVERY_STEP, "replay": {"enabled": False}}) as guard:
            guard.reporter.say = lambda _text: None
            yield from range(steps)
            assert "`replay.enabled` is false" in str(guard.coverage())

    assert same(train(lambda _net: other.tick, watch, steps=20), plain)
