"""Optimizers that are handed a closure: its end is where the gradients are complete."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.testing import EVERY_STEP, FaultyDevice, load_faults

ALWAYS = {"act": "protect", **EVERY_STEP}
STEPS = 7
FAULT = '[[fault]]\nkind = "multiply"\nfactor = 64.0\nsite = "0/addmm#0:forward.out0"\nfrom_step = 3\ntimes = 1\n'


def backward(net) -> torch.Tensor:
    loss = net(torch.randn(8, 6)).square().mean() / 2
    loss.backward()
    return loss


def the_last_micro_batch_in_the_closure(net, optimizer) -> None:
    """As Lightning does with ``accumulate_grad_batches=2``."""
    backward(net)
    optimizer.step(lambda: backward(net))
    optimizer.zero_grad()


def all_micro_batches_in_the_closure(net, optimizer) -> None:
    def closure():
        optimizer.zero_grad()
        return backward(net) + backward(net)

    optimizer.step(closure=closure)


def a_closure_that_only_gives_the_loss(net, optimizer) -> None:
    optimizer.zero_grad()
    loss = backward(net)
    optimizer.step(lambda: loss)


def train(step, guard=lambda *_: contextlib.nullcontext(), kind=torch.optim.SGD, steps=STEPS):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = kind(net.parameters(), lr=0.05)
    with guard(net, optimizer) as watching:
        for _ in range(steps):
            step(net, optimizer)
    return [p.detach() for p in net.parameters()], watching


WAYS = [
    the_last_micro_batch_in_the_closure,
    all_micro_batches_in_the_closure,
    a_closure_that_only_gives_the_loss,
]


@pytest.mark.parametrize("step", WAYS, ids=lambda way: way.__name__)
def test_every_step_is_counted_once_and_run_again(step) -> None:
    plain, _ = train(step)
    weights, guard = train(step, lambda *given: bw.Guard(*given, **ALWAYS))
    assert all(map(torch.equal, plain, weights))
    table = guard.coverage()
    assert table["steps"]["held"] == STEPS
    assert table["dismissed"] == table["suspicions"] == STEPS - 1


@pytest.mark.parametrize("step", WAYS, ids=lambda way: way.__name__)
def test_a_transient_is_healed_before_the_optimizer_goes_on(step, tmp_path) -> None:
    plain, _ = train(step)
    (tmp_path / "faults.toml").write_text(FAULT)
    with FaultyDevice(load_faults(tmp_path / "faults.toml")):
        weights, guard = train(step, lambda *given: bw.Guard(*given, **ALWAYS))
    assert guard.coverage()["verdicts"] == ["step 3: transient_hardware [0] healed"]
    assert all(map(torch.equal, plain, weights))


def test_an_optimizer_that_asks_its_closure_several_times(capsys) -> None:
    def step(net, optimizer) -> None:
        x = torch.randn(8, 6)

        def closure():
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    plain, _ = train(step, kind=torch.optim.LBFGS, steps=5)  # up to 20 closures a step
    weights, guard = train(step, lambda *given: bw.Guard(*given, **ALWAYS), kind=torch.optim.LBFGS, steps=5)
    assert all(map(torch.equal, plain, weights))
    steps = guard.coverage()["steps"]
    assert steps["held"] == 5
    assert steps["judged"] > 5
    assert f"5 steps ({steps['judged']} times gradients)" in capsys.readouterr().err
    assert guard.coverage()["verdicts"] == []
