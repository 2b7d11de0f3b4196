"""Code that reaches a whole library: nothing of it is made to run by being looked at, and the search is over in time."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
import types
import weakref

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.testing import EVERY_STEP

LOADED = []


class LazyDict(dict):
    """As transformers' auto classes have them: a mapping whose values are imported when somebody asks for them."""

    def load(self, *_):
        LOADED.append(type(self).__name__)
        raise AssertionError("loaded")

    values = items = keys = __iter__ = __getitem__ = __len__ = load


class LazyList(list):
    __iter__ = __getitem__ = __len__ = LazyDict.load


class LazyOrdered(collections.OrderedDict):
    values = items = keys = __getitem__ = __len__ = LazyDict.load


LAZY = [LazyDict(a=1), LazyList([1, 2]), LazyOrdered(a=[1])]


class Net(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.a, self.table = nn.Linear(8, 3), table

    def forward(self, x):
        return self.a(x) * len(LAZY) if self.table is not None else x


def train(table, steps=6):
    torch.manual_seed(0)
    net = Net(table)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with bw.Guard(net, optimizer, **EVERY_STEP) as guard:
        for _ in range(steps):
            loss = net(torch.randn(16, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return guard


@pytest.mark.parametrize("table", LAZY, ids=lambda table: type(table).__name__)
def test_a_lazy_container_is_not_made_to_load(table):
    LOADED.clear()
    coverage = train(table).coverage()
    assert LOADED == []
    assert coverage["verdicts"] == []
    assert coverage["dismissed"] > 0


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Make a module of a script's own: three thousand functions with defaults, in chains that all begin in one function."""
    chains, length = 30, 100
    lines = [
        "TABLE = {}",
        "def first(x):",
        f"    return x if not TABLE else ({', '.join(f'f{n}_0' for n in range(chains))})",
    ]
    for chain in range(chains):
        for number in range(length):
            lines += [f"def f{chain}_{number}(x, table={{{number}: []}}):", f"    return f{chain}_{number + 1}(x)"]
    module = types.ModuleType("much_code")
    module.__file__ = str(tmp_path / "much_code.py")
    exec(compile("\n".join(lines), module.__file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "much_code", module)
    return module


def test_a_script_of_thousands_of_functions_is_looked_through_in_seconds(library):
    class Big(Net):
        def forward(self, x):
            return self.a(library.first(x))

    torch.manual_seed(0)
    net = Big({})
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    began = time.process_time()
    with bw.Guard(net, optimizer):
        for _ in range(4):
            net(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    assert time.process_time() - began < 30  # quadratic in the functions it was minutes


class Recent(collections.OrderedDict):
    """A cache that moves what was used to its end."""


@pytest.mark.parametrize("kind", [collections.OrderedDict, Recent])
def test_an_order_that_a_forward_changes_is_put_back(kind):
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.order = nn.Linear(8, 3), kind(a=1.0, b=2.0, c=3.0)

        def forward(self, x):
            first = next(iter(self.order))
            self.order.move_to_end(first)
            return self.a(x) * self.order[first]

    def run(watch):
        torch.manual_seed(0)
        net = Caching()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        with watch(net, optimizer) as watching:
            for _ in range(12):
                loss = net(torch.randn(16, 8)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return list(net.order), net.a.weight.detach().clone(), watching

    wanted, plain, _ = run(lambda *_: contextlib.nullcontext())
    order, found, guard = run(lambda *given: bw.Guard(*given, act="protect", **EVERY_STEP))
    assert order == wanted
    assert torch.equal(found, plain)
    assert guard.coverage()["verdicts"] == []


class Held(dict):
    """A dictionary that can be referred to weakly."""


class Disguised:
    """An object that says it is a dictionary."""

    @property
    def __class__(self):
        return dict


def test_what_only_says_that_it_is_a_container_is_an_object_as_any_other():
    held = Held(a=1)
    for thing in (weakref.proxy(held), Disguised()):
        assert train(thing).coverage()["failures"] == {}
