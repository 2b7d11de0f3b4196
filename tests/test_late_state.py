"""State of every kind that a forward begins to change late: a re-execution leaves it as the training does.

Each case counts in the forward from some step on, and lets the result depend on it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import ctypes
import os
import queue
import types
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bitwitness as bw
from bitwitness.testing import EVERY_STEP, FaultyDevice, contained, from_mapping, load_faults

ALWAYS = {"act": "protect", **EVERY_STEP}
STEPS, LATE = 7, 3
COUNT = {"n": 0}
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("count", default=0)


class Key:
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.late = False
        self.count = None
        self.space = types.SimpleNamespace(n=0)
        self.arguments = argparse.Namespace(n=0)
        self.user = collections.UserDict(n=0)
        self.chain = collections.ChainMap({"n": 0})
        self.key = Key()
        self.weak = weakref.WeakKeyDictionary({self.key: 0})
        self.raw = ctypes.c_int(0)
        self.view = memoryview(bytearray(1))
        self.waiting = queue.PriorityQueue()

    def forward(self, x):
        x = F.gelu(self.a(x))
        if self.late and self.count is not None:
            x = x * (1.0 + 0.01 * self.count(self))
        return self.b(x)


def on_attribute(name):
    def count(net):
        getattr(net, name).n += 1
        return getattr(net, name).n

    return count


def on_key(name, key="n"):
    def count(net):
        getattr(net, name)[key] += 1
        return getattr(net, name)[key]

    return count


def on_weak_key(net):
    net.weak[net.key] += 1
    return net.weak[net.key]


def on_number(net):
    net.raw.value += 1
    return net.raw.value


def on_parameter(net):
    net.a.weight.n = getattr(net.a.weight, "n", 0) + 1
    return net.a.weight.n


def in_queue(net):
    net.waiting.put(net.waiting.qsize())
    return net.waiting.qsize()


def on_context(_net):
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def in_environment(_net):
    os.environ["LATE_STATE"] = str(int(os.environ.get("LATE_STATE", "0")) + 1)
    return int(os.environ["LATE_STATE"])


COUNTERS = {
    "SimpleNamespace": on_attribute("space"),
    "argparse": on_attribute("arguments"),
    "UserDict": on_key("user"),
    "ChainMap": on_key("chain"),
    "memoryview": on_key("view", 0),
    "WeakKeyDictionary": on_weak_key,
    "ctypes": on_number,
    "parameter's attribute": on_parameter,
    "PriorityQueue": in_queue,
    "context variable": on_context,
    "environment": in_environment,
}


def state_of(net: Net) -> list[object]:
    return [
        *(net.space.n, net.arguments.n, net.user["n"], net.chain["n"], net.weak[net.key], net.raw.value, net.view[0]),
        *(
            getattr(net.a.weight, "n", 0),
            net.waiting.qsize(),
            VARIABLE.get(),
            os.environ.get("LATE_STATE"),
            dict(COUNT),
        ),
    ]


def train(guarded: bool, prepare=lambda _net: None, around=lambda _net: contextlib.nullcontext(), loss_of=None):
    torch.manual_seed(0)
    COUNT["n"] = 0
    VARIABLE.set(0)
    os.environ.pop("LATE_STATE", None)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    guard = bw.Guard(net, optimizer, **ALWAYS) if guarded else contextlib.nullcontext()
    with guard:
        for step in range(STEPS):
            if step == LATE:
                net.late = True
                prepare(net)
            with around(net) if net.late else contextlib.nullcontext():
                out = net(torch.randn(6, 8))
                loss = out.square().mean() if loss_of is None or not net.late else loss_of(out)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    result = [p.detach().clone() for p in net.parameters()], state_of(net)
    os.environ.pop("LATE_STATE", None)
    return result, guard


def check(**how) -> bw.Guard:
    (plain, before), _ = train(guarded=False, **how)
    (weights, state), guard = train(guarded=True, **how)
    assert state == before
    assert all(map(torch.equal, plain, weights))
    assert not any("hardware" in verdict for verdict in guard.coverage()["verdicts"])
    return guard


@pytest.mark.parametrize("kind", COUNTERS)
def test_a_counter_of_any_kind_counts_the_trainings_own_forwards(kind: str) -> None:
    check(prepare=lambda net: setattr(net, "count", COUNTERS[kind]))


def patched(net: Net) -> None:
    def forward(self, x):
        COUNT["n"] += 1
        return self.b(F.gelu(self.a(x)) * (1.0 + 0.01 * COUNT["n"]))

    net.forward = types.MethodType(forward, net)


def test_a_forward_that_replaces_the_models_own_is_looked_at() -> None:
    check(prepare=patched)


class Scaled(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, grad):
        Scaled.calls += 1
        return grad * (1.0 + 0.01 * Scaled.calls)


def test_a_function_of_the_scripts_own_in_the_loss_code_keeps_its_count() -> None:
    def prepare(_net):
        Scaled.calls = 0

    check(prepare=prepare, loss_of=lambda out: Scaled.apply(out).square().mean())
    assert Scaled.calls == STEPS - LATE


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, _types, args=(), kwargs=None):
        COUNT["n"] += 1
        result = func(*args, **(kwargs or {}))
        return result * (1.0 + 1e-4 * COUNT["n"]) if func is F.gelu else result


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        COUNT["n"] += 1
        result = func(*args, **(kwargs or {}))
        return result * (1.0 + 1e-4 * COUNT["n"]) if func is torch.ops.aten.gelu.default else result


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_a_mode_of_the_scripts_sees_the_scripts_own_work_alone(mode: type) -> None:
    check(around=lambda _net: mode())


def test_hooks_on_saved_tensors_keep_their_count() -> None:
    def pack(x):
        COUNT["n"] += 1
        return x

    check(around=lambda _net: torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))


def test_a_file_that_the_forward_makes_and_reads_is_no_fault(tmp_path) -> None:
    path = tmp_path / "count"

    def count(_net):
        number = int(path.read_text()) + 1 if path.exists() else 1
        with path.open("w") as file:
            file.write(str(number))
        return number

    def prepare(net):
        path.unlink(missing_ok=True)
        net.count = count

    guard = check(prepare=prepare)
    assert path.read_text() == str(STEPS - LATE)
    assert guard.coverage()["verdicts"] == []


def test_python_repeats_no_warning_because_of_us(capsys: pytest.CaptureFixture[str]) -> None:
    def warn(_net):
        warnings.warn("an old way", FutureWarning, stacklevel=1)
        return 1

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_args, **_kwargs: print("WARNED", message)
        train(guarded=True, prepare=lambda net: setattr(net, "count", warn))
    assert capsys.readouterr().out.count("WARNED") == 1


def test_a_generator_that_is_not_used_is_not_said_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    net = Net()
    net.numbers = (number for number in range(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with bw.Guard(net, optimizer, **ALWAYS):
        for _ in range(4):
            net(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    said = capsys.readouterr().err
    assert "Net.numbers (generator) does not tell whether it moves in the forward, and cannot be put back" in said
    assert next(net.numbers) == 0


# -- a fault that strikes another place each time ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(4, 9))
@pytest.mark.parametrize("pattern", ["column", "element"])
def test_a_fault_that_wanders_is_never_healed_with_what_it_spoiled(first: int, pattern: str, tmp_path, capsys) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text(
        f'[[fault]]\nkind = "multiply"\nfactor = 64.0\nsite = "*a/addmm#0:forward.out0"\nfrom_step = {first}\n'
        f'pattern = "{pattern}"\n'
    )
    torch.manual_seed(0)
    net = nn.Sequential(collections.OrderedDict(a=nn.Linear(4, 8), t=nn.Tanh(), b=nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with (
        FaultyDevice(load_faults(faults)),
        contextlib.suppress(SystemExit),
        bw.Guard(net, optimizer, **ALWAYS) as guard,
    ):
        for _ in range(first + 4):
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.coverage()["verdicts"] == [f"step {first}: persistent_hardware [0] stopped"]
    assert "wrongly every time in a/addmm#0:forward.out0" in capsys.readouterr().err


def test_a_transient_is_healed_after_a_penalty_was_switched_on() -> None:
    """Steps of the new kind are replayed once, unasked: else nothing would be known of them when one is suspected."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.raw = torch.tanh(self.a(x))
            return self.b(self.raw)

    def train(*, struck: bool) -> tuple[list[torch.Tensor], bw.Guard | None]:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        fault = {
            "kind": "multiply",
            "factor": 1e6,
            "pattern": "all",
            "site": "b/mm*:backward",
            "steps": [60],
            "times": 1,
        }
        with contained(), FaultyDevice(from_mapping({"fault": [fault] if struck else []}), rank=0, seed=0):
            guard = bw.Guard(net, optimizer, act="protect", self_test=False).start() if struck else None
            for step in range(64):
                x = torch.randn(8, 6)
                loss = (net(x) - x[:, :3]).square().mean()
                if step >= 12:
                    loss = loss + 2 * net.raw.pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if guard is not None:
                guard.close()
        return [p.detach().clone() for p in net.parameters()], guard

    healthy, _ = train(struck=False)
    healed, guard = train(struck=True)
    assert guard is not None
    assert [(v.step, str(v.action)) for v in guard.verdicts] == [(60, "healed")]
    assert all(map(torch.equal, healthy, healed))
