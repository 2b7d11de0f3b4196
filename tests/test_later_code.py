"""What a script adds to its model, or exchanges, after the first steps: a re-execution leaves no trace there either."""

from __future__ import annotations

import collections
import contextlib
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import bitwitness as bw
from bitwitness.testing import EVERY_STEP

ALWAYS = {"act": "protect", **EVERY_STEP}
STEPS, LATE = 7, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)
        self.callback = None

    def forward(self, x):
        x = self.act(self.a(x))
        if self.callback is not None:
            self.callback(x)
        return self.b(x) * 1.0


def train(guarded, before=lambda _net, _step: contextlib.nullcontext(), after=lambda _out: None):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with guarded(net, optimizer) as guard:
        for step in range(STEPS):
            with before(net, step) or contextlib.nullcontext():
                out = net(torch.randn(6, 8))
            after(out)
            loss = out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()], guard


def plain(*_):
    return contextlib.nullcontext()


def always(net, optimizer):
    return bw.Guard(net, optimizer, **ALWAYS)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def shadowed(layer: nn.Linear, seen: list) -> None:
    own = layer.forward

    def forward(x):
        out = own(x)
        seen.append(out.mean().item())
        return out

    layer.forward = forward


def noting(seen: list) -> type[nn.Linear]:
    class Noting(nn.Linear):
        def forward(self, x):
            seen.append(float(x.sum()))
            return super().forward(x)

    return Noting


LATER = {
    "hook": lambda net, seen: net.a.register_forward_hook(lambda _m, _a, out: seen.append(out.mean().item())),
    "pre-hook": lambda net, seen: net.b.register_forward_pre_hook(lambda _m, args: seen.append(args[0].mean().item())),
    "backward hook": lambda net, seen: net.b.register_full_backward_hook(
        lambda _m, _i, go: seen.append(float(go[0].sum()))
    ),
    "parameter's hook": lambda net, seen: net.b.weight.register_hook(lambda g: seen.append(g.norm().item())),
    "callback": lambda net, seen: setattr(net, "callback", lambda x: seen.append(x.mean().item())),
    "method": lambda net, seen: shadowed(net.a, seen),
    "class": lambda net, seen: setattr(net.a, "__class__", noting(seen)),
}


@pytest.mark.parametrize("how", LATER)
def test_what_code_that_comes_later_writes_is_written_once(how: str, capsys) -> None:
    def run(guarded):
        seen: list = []

        def later(net, step) -> None:
            if step == LATE:
                LATER[how](net, seen)

        weights, guard = train(guarded, later)
        return weights, seen, guard

    weights, written, _ = run(plain)
    found, again, guard = run(always)
    said = capsys.readouterr().err
    assert "VERDICT" not in said
    assert again == written
    assert len(again) == STEPS - LATE
    assert same(weights, found)
    assert guard.coverage()["dismissed"] >= STEPS - 3, said


class Scale:
    def __init__(self) -> None:
        self.by = None

    def __call__(self, _module, _args, out):
        if self.by is None:
            self.by = float(out.detach().abs().mean())
        return out / self.by


def test_a_hook_that_calibrates_at_its_first_call_convicts_nobody(capsys) -> None:
    def later(net, step):
        if step == LATE:
            net.a.register_forward_hook(Scale())

    assert same(train(plain, later)[0], train(always, later)[0])
    assert "VERDICT" not in capsys.readouterr().err


AROUND = {
    "a library's function": lambda _: mock.patch.object(F, "gelu", lambda h, approximate="none": torch.relu(h)),
    "a method of tensors": lambda _: mock.patch.object(
        torch.Tensor, "__mul__", lambda h, by: torch.mul(torch.sin(h), by), create=True
    ),
    "a parameter away": lambda net: mock.patch.dict(net.a._parameters, {"bias": None}),
}


@pytest.mark.parametrize("what", AROUND)
def test_what_is_exchanged_around_the_forward_alone_convicts_nobody(what: str, capsys) -> None:
    def around(net, step):
        return AROUND[what](net) if step >= LATE else None

    weights, _ = train(plain, around)
    found, guard = train(always, around)
    said = capsys.readouterr().err
    assert "VERDICT" not in said
    assert "otherwise than a re-execution does" in said
    assert same(weights, found)
    assert guard.coverage()["dismissed"] == LATE - 1


@pytest.mark.parametrize("transform", ["grad", "vmap", "jacrev", "per sample"])
def test_a_transform_between_forward_and_backward_is_the_scripts_affair(transform: str, capsys) -> None:
    def f(w):
        return (w * 2).tanh().sum()

    layer = nn.Linear(4, 1)
    held = {name: p.detach() for name, p in layer.named_parameters()}
    ways = {
        "grad": grad(f),
        "vmap": vmap(f),
        "jacrev": jacrev(f),
        "per sample": lambda x: vmap(grad(lambda p, row: functional_call(layer, p, (row,)).sum()), (None, 0))(held, x),
    }
    told: list = []
    runs = [train(guarded, after=lambda out: told.append(ways[transform](out.detach()))) for guarded in (plain, always)]
    assert same(runs[0][0], runs[1][0])
    assert len(told) == 2 * STEPS
    table = runs[1][1].coverage()
    assert table["failures"] == {}
    assert table["dismissed"] == STEPS - 1, capsys.readouterr().err


def test_a_warning_of_the_forward_reaches_the_script_once() -> None:
    def run(guarded) -> int:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            train(guarded, lambda net, _: setattr(net, "callback", lambda _: warnings.warn("again", stacklevel=1)))
        return sum(str(one.message) == "again" for one in seen)

    assert run(plain) == run(always) == STEPS


def test_a_mode_of_the_scripts_sees_the_scripts_operators_alone() -> None:
    class Log(TorchDispatchMode):
        def __init__(self, count) -> None:
            super().__init__()
            self.count = count

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count[str(func)] += 1
            return func(*args, **(kwargs or {}))

    def run(guarded) -> collections.Counter:
        count: collections.Counter = collections.Counter()
        train(guarded, lambda _net, _step: Log(count))
        return count

    assert run(always) == run(plain)


def test_parameters_frozen_between_forward_and_backward_convict_nobody(capsys) -> None:
    def run(guarded) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with guarded(net, optimizer):
            for step in range(STEPS):
                loss = net(torch.randn(6, 8)).square().mean()
                optimizer.zero_grad()
                net.a.requires_grad_(step < LATE)
                loss.backward()
                net.a.requires_grad_(True)
                optimizer.step()
        return [p.detach() for p in net.parameters()]

    assert same(run(plain), run(always))
    said = capsys.readouterr().err
    assert "VERDICT" not in said
    assert "parameters were frozen between the forward and the backward" in said


class Counted(nn.Module):
    calls = 0

    def __call__(self, *args):
        type(self).calls += 1
        return super().__call__(*args)


class Layer(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x):
        return self.a(x)


def test_a_counter_of_a_class_that_is_raised_through_a_subclass_is_put_back() -> None:
    net = nn.Sequential(Layer())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with bw.Guard(net, optimizer, **ALWAYS):
        for _ in range(STEPS):
            net(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert Layer.calls == STEPS
