"""Hooks on gradients, and backwards for some parameters: what they change is the script's affair, and accuses nobody."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bitwitness as bw
from bitwitness.testing import EVERY_STEP

ALWAYS = EVERY_STEP
STEPS, LATE = 8, (4, 6)


def double(gradient):
    return None if gradient is None else gradient * 2


def doubled(gradients, _=None):
    return tuple(map(double, gradients))


def scale_in_place(parameter):
    parameter.grad.mul_(2)


def scale_data(parameter):
    parameter.grad.data.mul_(2)


def replace(parameter):
    parameter.grad = parameter.grad * 2


AFTER_FORWARD = {
    "output": lambda out: out.register_hook(double),
    "output's node": lambda out: out.grad_fn.register_hook(doubled),
    "before output's node": lambda out: out.grad_fn.register_prehook(doubled),
}
IN_LOSS = {
    "value": lambda value: value.register_hook(double),
    "value's node": lambda value: value.grad_fn.register_hook(doubled),
}
ON_WEIGHT = {
    "weight": lambda weight: weight.register_hook(double),
    "accumulated, in place": lambda weight: weight.register_post_accumulate_grad_hook(scale_in_place),
    "accumulated, through data": lambda weight: weight.register_post_accumulate_grad_hook(scale_data),
    "accumulated, replaced": lambda weight: weight.register_post_accumulate_grad_hook(replace),
}


def train(kind: str, guarded=lambda *_: contextlib.nullcontext()) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with guarded(net, optimizer):
        for step in range(STEPS):
            x = torch.randn(16, 10)
            late = step in LATE
            handle = ON_WEIGHT[kind](net[0].weight) if late and kind in ON_WEIGHT else None
            out = net(x)
            if late and kind in AFTER_FORWARD:
                AFTER_FORWARD[kind](out)
            value = F.log_softmax(out, -1)
            if late and kind in IN_LOSS:
                IN_LOSS[kind](value)
            optimizer.zero_grad()
            F.nll_loss(value, x[:, :3].argmax(1)).backward()
            if handle is not None:
                handle.remove()
            optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", [*AFTER_FORWARD, *IN_LOSS, *ON_WEIGHT])
def test_a_hook_that_changes_a_gradient_late_convicts_nobody(kind, capsys) -> None:
    plain = train(kind)
    guards = []

    def guarded(*given):
        guards.append(bw.Guard(*given, act="protect", **ALWAYS))
        return guards[0]

    found = train(kind, guarded)
    said = capsys.readouterr().err
    assert "VERDICT" not in said
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert guards[0].coverage()["dismissed"] == STEPS - len(LATE) - 1, said
    reason = (
        "the hooks on parameters' gradients are not the same now as in the backward"
        if kind == "weight"
        else "changes a gradient in the backward, outside the model's forward"
    )
    assert reason in said


def test_hooks_that_only_look_are_called_once_a_step_and_hinder_no_replay(capsys) -> None:
    seen: list[str] = []
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    behind = net[0].weight
    handle = behind.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    with bw.Guard(net, optimizer, act="protect", **ALWAYS) as guard:
        for _ in range(STEPS):
            out = net(torch.randn(16, 10))
            out.register_hook(lambda _: seen.append("output"))
            value = out.square()
            value.grad_fn.register_hook(lambda *_: seen.append("node"))
            optimizer.zero_grad()
            value.mean().backward()
            optimizer.step()
    table = guard.coverage()
    assert table["dismissed"] == table["suspicions"] == STEPS - 1, capsys.readouterr().err
    assert sorted(seen) == sorted(["accumulated", "output", "node"] * STEPS)
    assert behind._post_accumulate_grad_hooks[handle.id].__name__ == "<lambda>"  # the script's own again
    assert torch.Tensor.register_hook.__module__ == "torch._tensor"


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 20), nn.Linear(20, 3)

    def forward(self, x):
        return self.b(checkpoint(lambda x: self.a(x).relu(), x, use_reentrant=True))


def test_parameters_hooks_take_part_in_a_replay_below_a_reentrant_checkpoint(capsys) -> None:
    torch.manual_seed(0)
    net = Reentrant()
    net.a.weight.register_hook(double)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bw.Guard(net, optimizer, act="protect", **ALWAYS) as guard:
        for _ in range(4):
            net(torch.randn(16, 10, requires_grad=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.coverage()["dismissed"] == 3, capsys.readouterr().err


def compared(run, capsys) -> tuple[dict, str]:
    """Run plain and guarded; see that nobody is accused and the bits are the same; return the coverage, and what was said."""
    plain, _ = run(lambda *_: contextlib.nullcontext())
    found, table = run(lambda *given: bw.Guard(*given, act="protect", **ALWAYS))
    said = capsys.readouterr().err
    assert "VERDICT" not in said
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    return table, said


@pytest.mark.parametrize("some", [True, False])
def test_a_backward_for_some_parameters_alone_convicts_nobody(some, capsys) -> None:
    def run(guarded) -> tuple[list[torch.Tensor], dict]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with guarded(net, optimizer) as guard:
            for step in range(STEPS):
                optimizer.zero_grad()
                late = list((net[2] if some else net).parameters()) if step >= LATE[0] else None
                net(torch.randn(4, 8)).square().mean().backward(inputs=late)
                optimizer.step()
        return [p.detach() for p in net.parameters()], guard and guard.coverage()

    table, said = compared(run, capsys)
    assert table["dismissed"] == (LATE[0] - 1 if some else STEPS - 1), said
    assert ("the backward is asked for the gradients of some parameters only" in said) == some


def test_a_backward_for_another_models_parameters_is_not_this_models(capsys) -> None:
    """A generator's loss goes through the critic, and asks for the generator's gradients alone."""

    def run(guarded) -> tuple[list[torch.Tensor], dict]:
        torch.manual_seed(0)
        made, judge = nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (made, judge))
        with guarded(judge, theirs) as guard:
            for _ in range(STEPS):
                ours.zero_grad()
                judge(made(torch.randn(4, 8))).mean().backward(inputs=list(made.parameters()))
                ours.step()
                theirs.zero_grad()
                judge(torch.randn(4, 4)).square().mean().backward()
                theirs.step()
        return [p.detach() for p in judge.parameters()], guard and guard.coverage()

    table, said = compared(run, capsys)
    assert table["dismissed"] == STEPS - 1, said


class Counting(TorchDispatchMode):
    """A user's mode that counts operators."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Counting.seen += 1
        return func(*args, **(kwargs or {}))


def test_a_hook_behind_an_accumulation_shows_a_mode_of_the_scripts_nothing_of_ours() -> None:
    def train(watch):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        net[2].bias.register_post_accumulate_grad_hook(lambda _: None)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        counts = []
        with watch(net, optimizer):
            for _ in range(5):
                Counting.seen = 0
                with Counting():
                    net(torch.ones(4, 8)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                counts.append(Counting.seen)
        return counts

    assert train(bw.Guard) == train(lambda *_: contextlib.nullcontext())
