"""What a forward keeps where its code does not mention it by name: modules imported inside, other ways to names, files.

The forward meets a key for the first time now and then, computes exactly, and remembers it; from then on, half of that. Every
step is questioned, so that a re-execution that knows the key already would be taken for the healthy one.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import importlib
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from extent import chosen
from torch import nn

import bitwitness as bw
from bitwitness.tap.timer import file_clock
from bitwitness.testing import EVERY_STEP

ALWAYS = {"act": "protect", **EVERY_STEP}
STEPS, NEW_EVERY = 11, 4
SEEN: set[int] = set()


def remembered(keys, key) -> bool:
    known = key in keys
    keys.add(key)
    return known


def is_of_tests(module) -> bool:
    """Tell whether a module is a test's or one that tests share, whose functions a lookup by name reaches, too."""
    return Path(getattr(module, "__file__", None) or "/").parent == Path(__file__).parent


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Name a module of the script's that holds a set, and is not imported yet."""
    name = f"memory_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text("SEEN = set()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for other in [one for one, held in sys.modules.items() if one != __name__ and is_of_tests(held)]:
        monkeypatch.delitem(sys.modules, other)  # no script has hundreds of modules of other tests beside it
    yield name
    sys.modules.pop(name, None)


def imported_inside(_folder, name):
    place = {}
    exec(f"def seen(key):\n import {name}\n known = key in {name}.SEEN\n {name}.SEEN.add(key)\n return known\n", place)
    return place["seen"]


def from_inside(_folder, name):
    place = {}
    exec(f"def seen(key):\n from {name} import SEEN\n known = key in SEEN\n SEEN.add(key)\n return known\n", place)
    return place["seen"]


def imported_around(_folder, name):
    place = {}
    body = f" def seen(key):\n  known = key in {name}.SEEN\n  {name}.SEEN.add(key)\n  return known\n return seen\n"
    exec(f"def make():\n import {name}\n{body}", place)
    return place["make"]()


def by_importlib(_folder, name):
    return lambda key: remembered(importlib.import_module(name).SEEN, key)


def by_globals(_folder, _name):
    SEEN.clear()
    return lambda key: remembered(globals()["SEEN"], key)


def by_sys_modules(_folder, _name):
    SEEN.clear()
    return lambda key: remembered(sys.modules[__name__].SEEN, key)


def among_builtins(_folder, _name):
    builtins.seen_by_test = set()
    return lambda key: remembered(seen_by_test, key)  # noqa: F821


def made_by_hand(_folder, _name):
    sys.modules["made_by_hand"] = types.ModuleType("made_by_hand")
    sys.modules["made_by_hand"].SEEN = set()

    def seen(key):
        import made_by_hand

        return remembered(made_by_hand.SEEN, key)

    return seen


def custom_operator(folder, name):
    keys = set()

    @torch.library.custom_op(f"bitwitness_tests::{name}_{folder.name}", mutates_args=())
    def op(key: int, like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, float(remembered(keys, key)))

    return lambda key: bool(op(key, torch.zeros(1)))


def next_tick():
    """Wait until the clock of files has moved on: what was written by then is older than the next forward."""
    began = file_clock()
    while file_clock() < began + 30_000_000:
        time.sleep(0.005)


def empty_files(folder, _name):
    def seen(key):
        known = (folder / str(key)).exists()
        if not known:
            (folder / str(key)).touch()
            next_tick()
        return known

    return seen


def folders(folder, _name):
    def seen(key):
        try:
            (folder / str(key)).mkdir()
        except FileExistsError:
            return True
        next_tick()
        return False

    return seen


def torchs_files(folder, _name):
    def seen(key):
        path = folder / f"{key}.pt"
        try:
            torch.load(path)
        except FileNotFoundError:
            torch.save(torch.ones(1), path)
            next_tick()
            return False
        return True

    return seen


class Net(nn.Module):
    def __init__(self, seen) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.seen = seen
        self.register_buffer("table", torch.randn(STEPS, 8))

    def forward(self, x, key):
        row = 0.5 * self.table[key] if self.seen(key) else self.table[key]
        return self.b(torch.tanh(self.a(x + row)))


def train(seen, guard):
    torch.manual_seed(0)
    net = Net(seen)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with guard(net, optimizer) as watching:
        for step in range(STEPS):
            x = torch.randn(16, 8)
            loss = F.cross_entropy(net(x, step // NEW_EVERY), (x[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()], watching


def beside_much_else(_folder, _name):
    much = [[[n] for n in range(200)] for _ in range(200)]
    keys = set()
    return lambda key: remembered(keys, key) if much else None


MEMORIES = [
    imported_inside,
    from_inside,
    imported_around,
    by_importlib,
    *chosen([by_globals, by_sys_modules], []),
    among_builtins,
    made_by_hand,
    custom_operator,
    empty_files,
    folders,
    torchs_files,
]


@pytest.mark.parametrize("memory", MEMORIES, ids=lambda memory: memory.__name__)
def test_a_forward_that_remembers_is_repeated_as_it_was_or_not_at_all(memory, module, tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "guarded").mkdir()
    wanted, _ = train(memory(tmp_path / "plain", module), lambda *_: contextlib.nullcontext())
    sys.modules.pop(module, None)
    got, guard = train(memory(tmp_path / "guarded", module), lambda *given: bw.Guard(*given, **ALWAYS))
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert guard.coverage()["verdicts"] == []
    assert guard.coverage()["dismissed"] >= STEPS // 2


def test_where_more_is_reached_than_can_be_looked_at_nothing_is_repeated(capsys, tmp_path):
    wanted, _ = train(beside_much_else(tmp_path, ""), lambda *_: contextlib.nullcontext())
    got, guard = train(beside_much_else(tmp_path, ""), lambda *given: bw.Guard(*given, **ALWAYS))
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert guard.coverage()["verdicts"] == []
    assert guard.coverage()["dismissed"] == 0
    assert "reaches more than can be looked at" in capsys.readouterr().err


class Momentum(nn.Module):
    """Compares itself with a frozen copy, which follows it from some step on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.query, self.first, self.step = nn.Linear(8, 3), first, 0
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x, _key):
        if self.step >= self.first:
            for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs.detach(), alpha=0.1)
        self.step += 1
        return self.query(x) - self.key(x)


@pytest.mark.parametrize("first", [0, 1, 7])
def test_a_frozen_copy_that_follows_the_model_in_its_forward_is_put_back(first, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "Net", lambda _seen: Momentum(first))
    wanted, _ = train(None, lambda *_: contextlib.nullcontext())
    got, guard = train(None, lambda *given: bw.Guard(*given, **ALWAYS))
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    table = guard.coverage()
    assert table["verdicts"] == []
    assert table["dismissed"] + 2 >= table["suspicions"] == STEPS - 1
