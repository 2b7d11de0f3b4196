"""Several forwards of one model in a step: two views, a target that is only read, a look at the frozen model."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw
from bitwitness.testing import EVERY_STEP, FaultyDevice, load_faults

ALWAYS = {"act": "protect", **EVERY_STEP}
STEPS = 6
FAULT = """
[[fault]]
kind = "multiply"
factor = 64.0
site = "0/addmm#0:forward.out0"
from_step = 3
times = 1
"""


def two_views(net, x):
    a, b = net(x), net(x + 0.1 * torch.randn_like(x))
    return F.cross_entropy(F.normalize(a) @ F.normalize(b).T / 0.2, torch.arange(len(x)))


def a_target_detached(net, x):
    return F.mse_loss(net(x), net(x + 1.0).detach())


def a_target_first(net, x):
    target = net(x + 1.0).detach()
    return F.mse_loss(net(x), target) + (net(x) - target).abs().mean()


def one_unused(net, x):
    net(2 * x)
    return net(x).square().mean()


LOSSES = {loss.__name__: loss for loss in (two_views, a_target_detached, a_target_first, one_unused)}


def train(loss_of, guarded: bool, norm=nn.BatchNorm1d, between=lambda _net, _step: None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    with bw.Guard(net, optimizer, **ALWAYS) if guarded else contextlib.nullcontext() as guard:
        for step in range(STEPS):
            loss = loss_of(net, torch.randn(6, 6))
            between(net, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [t.detach().clone() for t in net.state_dict().values()], guard


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
@pytest.mark.parametrize("loss", LOSSES)
def test_all_of_them_are_run_again(loss: str, norm: type) -> None:
    plain, _ = train(LOSSES[loss], guarded=False, norm=norm)
    weights, guard = train(LOSSES[loss], guarded=True, norm=norm)
    assert all(map(torch.equal, plain, weights))
    table = guard.coverage()
    assert table["verdicts"] == []
    assert table["dismissed"] == table["suspicions"] > 0


@pytest.mark.parametrize("loss", ["two_views", "a_target_detached", "a_target_first"])
def test_a_fault_in_the_first_of_them_is_healed(loss: str, tmp_path) -> None:
    plain, _ = train(LOSSES[loss], guarded=False)
    faults = tmp_path / "faults.toml"
    faults.write_text(FAULT)
    with FaultyDevice(load_faults(faults)) as device:
        weights, guard = train(LOSSES[loss], guarded=True)
    assert len(device.fired) == 1
    assert guard.coverage()["verdicts"] == ["step 3: transient_hardware [0] healed"]
    assert all(map(torch.equal, plain, weights))


def saliency(net, step):
    if step == 3:
        net.requires_grad_(requires_grad=False)
        x = torch.ones(6, 6, requires_grad=True)
        torch.autograd.grad(net(x).sum(), x)
        net.requires_grad_(requires_grad=True)


def partly_frozen(net, step):
    if step >= 3:
        net[0].requires_grad_(requires_grad=False)
        net(torch.ones(6, 6))
        net[0].requires_grad_(requires_grad=True)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("look", [saliency, partly_frozen])
def test_a_look_at_the_frozen_model_ends_no_guard(look, before: bool) -> None:
    def loss_of(net, x):
        loss_of.step += 1
        if before:
            look(net, loss_of.step)
        return net(x).square().mean()

    between = (lambda _net, _step: None) if before else look
    loss_of.step = -1
    plain, _ = train(loss_of, guarded=False, norm=nn.LayerNorm, between=between)
    loss_of.step = -1
    weights, guard = train(loss_of, guarded=True, norm=nn.LayerNorm, between=between)
    assert all(map(torch.equal, plain, weights))
    table = guard.coverage()
    assert table["steps"]["held"] == STEPS
    assert table["parameters"]["watched"] == 6
    assert table["suspicions"] >= STEPS - 2
    assert table["verdicts"] == []


def test_layers_that_are_frozen_for_good_are_missed_by_nobody() -> None:
    def freeze(net, step):
        if step == 3:
            net[0].requires_grad_(requires_grad=False)

    _, guard = train(lambda net, x: net(x).square().mean(), guarded=True, norm=nn.LayerNorm, between=freeze)
    assert guard.coverage()["parameters"] == {"watched": 6, "of": 6}  # as long as they were trained
    assert guard.coverage()["verdicts"] == []
    assert not any("too rarely" in gap for gap in guard.coverage()["not_covered"])


@pytest.mark.parametrize("when", ["before the forward", "after the backward"])
def test_the_step_in_which_layers_are_frozen_accuses_nobody(when: str, capsys) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with bw.Guard(net, optimizer, **ALWAYS) as guard:
        for step in range(STEPS):
            optimizer.zero_grad()
            asks = step < 5
            if when == "before the forward":
                net[0].requires_grad_(asks)
            net(torch.randn(6, 6)).square().mean().backward()
            net[0].requires_grad_(asks)
            optimizer.step()
    table = guard.coverage()
    assert (table["verdicts"], table["failures"]) == ([], {})
    left_open = when == "after the backward"  # what autograd gave for it can no longer be asked for
    assert table["suspicions"] >= STEPS - 2
    assert (table["dismissed"], table["left_open"]) == (table["suspicions"] - left_open, left_open)
    assert ("does not require grad" in capsys.readouterr().err) == left_open


def accumulate(guarded: bool, between=lambda _net: None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with bw.Guard(net, optimizer, **ALWAYS) if guarded else contextlib.nullcontext() as guard:
        for _ in range(STEPS):
            for _ in range(3):
                net(torch.randn(6, 6)).square().mean().div(3).backward()
                between(net)
            optimizer.step()
            optimizer.zero_grad()
    return [t.detach().clone() for t in net.state_dict().values()], guard


def statistics_moved(net):
    with torch.no_grad():
        net(torch.ones(6, 6))  # in training mode: it moves the running statistics without a word


@pytest.mark.parametrize("between", [lambda _net: None, statistics_moved], ids=["plain", "statistics moved between"])
def test_running_statistics_of_micro_batches_are_healed_or_left(between, tmp_path, capsys) -> None:
    plain, _ = accumulate(guarded=False, between=between)
    weights, guard = accumulate(guarded=True, between=between)
    assert all(map(torch.equal, plain, weights))
    faults = tmp_path / "faults.toml"
    faults.write_text(FAULT)
    with FaultyDevice(load_faults(faults)):
        weights, guard = accumulate(guarded=True, between=between)
    assert guard.coverage()["verdicts"] == ["step 3: transient_hardware [0] healed"]
    healed = [torch.equal(a, b) for a, b in zip(plain, weights, strict=True)]
    if between is not statistics_moved:
        assert all(healed)
    assert all(healed[:4] + healed[6:])  # all but the statistics, which something else moved since
    said = "the buffers, which the script has changed since the forward, stay as they are" in capsys.readouterr().err
    assert said == (between is statistics_moved)


def test_the_loss_that_the_script_logs_is_healed_too(tmp_path) -> None:
    def train(guarded):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        logged = []
        with bw.Guard(net, optimizer, **ALWAYS) if guarded else contextlib.nullcontext():
            for _ in range(STEPS):
                loss = F.mse_loss(net(torch.randn(6, 6)), torch.ones(6, 4))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                logged.append(loss.item())
        return logged

    faults = tmp_path / "faults.toml"
    faults.write_text(FAULT)
    healthy = train(guarded=False)
    with FaultyDevice(load_faults(faults)) as device:
        assert train(guarded=True) == healthy
    assert len(device.fired) == 1
