"""The guard in a single process: what it refuses, what it heals, what it says."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from scenarios import Scenario, train
from torch import nn

import bitwitness as bw
from bitwitness.sense.trend import TrendSensor
from bitwitness.testing import FaultyDevice, from_mapping


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def test_refuses_what_it_cannot_guard() -> None:
    net = model()
    with pytest.raises(bw.UsageError, match="no parameters that require a gradient"):
        bw.Guard(nn.ReLU())
    with pytest.raises(bw.UsageError, match=r"expects a torch\.nn\.Module"):
        bw.Guard("net")
    with pytest.raises(bw.UsageError, match="holds none of the parameters"):
        bw.Guard(net, torch.optim.SGD(model().parameters(), lr=1.0))
    with pytest.raises(bw.ConfigError, match="protect"):
        bw.Guard(net, act="protct")
    with pytest.raises(bw.ConfigError, match="deep_every"):
        bw.Guard(net, deep_evry=3)


def test_one_guard_a_training_and_one_a_model() -> None:
    net = model()
    guard = bw.Guard(net)
    with guard, pytest.raises(bw.UsageError, match="guarded already"), bw.Guard(net):
        pass
    with pytest.raises(bw.UsageError, match="used before"), guard:
        pass


def test_an_optimizer_that_never_steps_is_said(capsys: pytest.CaptureFixture) -> None:
    net = model()
    with bw.Guard(net):
        net(torch.randn(3, 4)).sum().backward()
    assert "no optimizer step was seen" in capsys.readouterr().err


def with_fault(fault: dict, scenario: Scenario, **settings) -> tuple[list[str], bw.Guard, FaultyDevice]:
    guards: list[bw.Guard] = []

    def guarded(net, optimizer):
        guards.append(bw.Guard(net, optimizer, trend={"warmup": 3}, **settings))
        return guards[-1]

    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        lines = train(scenario, guarded)
    return lines, guards[0], device


TRANSIENT = {"site": "layers.1.mlp.up/mm:backward", "steps": [7], "times": 1, "kind": "exponent_msb"}


@pytest.mark.parametrize("scenario", [Scenario("gpt", steps=10), Scenario("gpt", steps=10, clip=1.0, accumulate=2)])
def test_a_transient_is_healed_alone(scenario: Scenario) -> None:
    clean = train(scenario)
    lines, guard, device = with_fault(TRANSIENT, scenario, act="protect")
    assert len(device.fired) == 1
    assert guard.coverage()["verdicts"] == ["step 7: transient_hardware [0] healed"]
    assert lines[-1].split("]")[1] == clean[-1].split("]")[1]  # weights, optimizer state, random state


def test_observe_touches_nothing() -> None:
    scenario = Scenario("gpt", steps=10)
    lines, guard, _ = with_fault(TRANSIENT, scenario)
    with FaultyDevice(from_mapping({"fault": [TRANSIENT]})):
        unguarded = train(scenario)
    assert lines == unguarded
    assert guard.coverage()["verdicts"] == ["step 7: transient_hardware [0] reported"]


def test_a_persistent_fault_alone_is_proven_by_the_operator() -> None:
    fault = {
        "site": "layers.0.mlp.down/addmm:forward", "from_step": 7, "kind": "multiply", "factor": 1e3,
        "pattern": "column", "element": 3,
    }  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        with_fault(fault, Scenario("gpt", steps=10), act="protect")
    assert stop.value.code == 17
    assert "layers.0.mlp.down/addmm#0:forward.out0" in str(stop.value)
    assert "model.py:" in str(stop.value)


def test_a_model_in_float64_is_judged_too() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    fault = {"site": "2/addmm:forward", "from_step": 12, "kind": "multiply", "factor": 1e3, "pattern": "all"}
    often = {"trend": {"z": 1e-9, "warmup": 1}, "self_test": False}
    with FaultyDevice(from_mapping({"fault": [fault]})), bw.Guard(net, optimizer, **often) as guard:
        for _ in range(14):
            net(torch.randn(6, 4).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    verdicts = guard.coverage()["verdicts"]
    assert verdicts[:1] == ["step 12: persistent_hardware [0] reported"], verdicts
    assert "2/addmm#0:forward.out0" in str(guard.verdicts[0].site)


def test_a_nan_batch_is_the_datas_fault(capsys: pytest.CaptureFixture) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with bw.Guard(net, optimizer, act="protect") as guard:
        for step in range(3):
            x = torch.randn(5, 4)
            x[2, 1] = float("nan") if step == 2 else 0.0
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.coverage()["verdicts"] == ["step 2: data [] reported"]
    assert "holds NaN or Inf" in capsys.readouterr().err


class LogOfZero(nn.Module):
    """Makes its own infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.relu(self.layer(x))).mean()


def test_a_log_of_zero_is_the_softwares_fault_with_its_line(capsys: pytest.CaptureFixture) -> None:
    net = LogOfZero()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with bw.Guard(net, optimizer) as guard:
        net(torch.randn(5, 4)).backward()
        optimizer.step()
    assert guard.coverage()["verdicts"] == ["step 0: software [] reported"]
    told = capsys.readouterr().err
    assert "log made " in told
    assert "test_guard.py:" in told


def test_two_models_and_optimizers_keep_apart() -> None:
    first, second = model(), model()
    one, two = (torch.optim.SGD(net.parameters(), lr=0.01) for net in (first, second))
    with bw.Guard(first, one) as a, bw.Guard(second, two) as b:
        for _ in range(4):
            for net, optimizer in ((first, one), (second, two)):
                net(torch.randn(3, 4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    for guard in (a, b):
        table = guard.coverage()
        assert table["steps"]["held"] == 4
        assert table["failures"] == {}
        assert table["verdicts"] == []


def test_an_error_of_our_own_never_reaches_the_training(capsys, monkeypatch) -> None:
    from bitwitness.sense.trend import TrendSensor

    monkeypatch.setattr(TrendSensor, "look", lambda self, light: 1 / 0)
    scenario = Scenario("gpt", steps=4)
    guards: list[bw.Guard] = []

    def guarded(net, optimizer):
        guards.append(bw.Guard(net, optimizer, self_test=False))
        return guards[-1]

    assert train(scenario, guarded) == train(scenario)
    assert "ZeroDivisionError" in guards[0].coverage()["sensors"]["off"]["trend"]
    assert capsys.readouterr().err.count("the training is untouched") == 1


def test_stop_ends_at_the_anomaly_without_proof(monkeypatch, capsys) -> None:
    monkeypatch.setenv("NPU_ASD_ENABLE", "1")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def nine_steps() -> None:
        with bw.Guard(net, optimizer):
            for step in range(9):
                x = torch.randn(5, 4) * (float("inf") if step == 8 else 1.0)
                net(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(SystemExit) as stop:
        nine_steps()
    assert stop.value.code == 16
    assert "unproven" in capsys.readouterr().err


def test_a_guard_that_is_gone_keeps_no_model() -> None:
    # Hooks on autograd's nodes are seen by no garbage collector: one that led back to the guard would keep all of it.
    def train() -> weakref.ref:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with bw.Guard(net, optimizer, self_test=False):
            for _ in range(4):
                net(torch.randn(4, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return weakref.ref(net)

    kept = train()
    gc.collect()
    assert kept() is None


class Keeping(nn.Module):
    """Keeps a moving average of what it computes, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.average = nn.Linear(4, 8), nn.Linear(8, 1), torch.zeros(8)

    def forward(self, x):
        h = torch.tanh(self.first(x) + 0.01 * self.average)
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return self.last(h)


def keep(*faults: dict) -> tuple[list[torch.Tensor], list[str]]:
    torch.manual_seed(0)
    net = Keeping()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with (
        FaultyDevice(from_mapping({"fault": list(faults)})),
        bw.Guard(net, optimizer, act="protect", trend={"z": 1e-9, "warmup": 1}, replay={"rest": False}) as guard,
    ):
        for _ in range(12):
            net(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*(p.detach().clone() for p in net.parameters()), net.average], guard.coverage()["verdicts"]


def test_a_heal_puts_right_what_else_the_forward_keeps() -> None:
    struck = {"site": "first/addmm:forward", "kind": "multiply", "factor": 1e4, "pattern": "all"}
    free, _ = keep(struck | {"from_step": 1000})
    found, verdicts = keep(struck | {"steps": [7], "times": 1})
    assert verdicts == ["step 7: transient_hardware [0] healed"]
    assert all(torch.equal(a, b) for a, b in zip(free, found, strict=True))


@pytest.mark.parametrize("site", ["1/addmm:forward", "*/addmm:forward"])
def test_a_product_that_is_always_wrong_convicts_beside_sparse_ones(site: str) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 2)])
            index = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
            self.edges = torch.sparse_coo_tensor(index, torch.ones(5), (5, 5), check_invariants=True).coalesce()

        def forward(self, x):
            return self.layers[1](torch.sparse.mm(self.edges, torch.relu(self.layers[0](x))))

    torch.manual_seed(0)
    net = Graph()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    fault = {
        "site": site.replace("1/", "layers.1/"),
        "from_step": 8,
        "kind": "multiply",
        "factor": 1e3,
        "pattern": "all",
    }
    with (  # noqa: PT012 - it is raised in one of several steps
        pytest.raises(bw.TrainingStopped) as stop,
        FaultyDevice(from_mapping({"fault": [fault]})),
        bw.Guard(net, optimizer, act="protect", trend={"warmup": 4}, self_test=False) as guard,
    ):
        for _ in range(12):
            net(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert stop.value.code == 17
    assert guard.coverage()["verdicts"] == ["step 8: persistent_hardware [0] stopped"]


def test_losses_changed_in_place_are_repeated_micro_batch_by_micro_batch() -> None:
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    always = {"trend": {"z": 1e-9, "warmup": 1}, "replay": {"rest": False}}
    with bw.Guard(net, optimizer, self_test=False, **always) as guard:
        for _ in range(5):
            for _ in range(3):
                loss = net(torch.randn(6, 4)).square().mean()
                loss *= 2.0
                (loss / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.coverage()["dismissed"] == 4
    assert guard.coverage()["left_open"] == 0


def test_a_forward_inside_a_functional_transform_is_left_alone(capsys: pytest.CaptureFixture) -> None:
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loss_of(parameters, x):
        return torch.func.functional_call(net, parameters, (x,)).square().mean()

    with bw.Guard(net, optimizer, self_test=False, trend={"z": 1e-9, "warmup": 1}) as guard:
        for _ in range(5):
            grads = torch.func.grad(loss_of)(dict(net.named_parameters()), torch.randn(6, 4))
            for name, parameter in net.named_parameters():
                parameter.grad = grads[name].detach()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.coverage()["verdicts"] == []
    assert guard.coverage()["failures"] == {}
    assert "failed in its" not in capsys.readouterr().err


def test_a_sensor_that_fails_is_off_from_that_step_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    guards: list[bw.Guard] = []
    look = TrendSensor.look

    def fails(sensor, light):
        if light.step == 3:
            raise ZeroDivisionError("planted")
        return look(sensor, light)

    monkeypatch.setattr(TrendSensor, "look", fails)
    events: list = []

    def guarded(net, optimizer):
        guards.append(bw.Guard(net, optimizer, on_event=events.append))
        return guards[-1]

    scenario = Scenario("gpt", steps=6)
    assert train(scenario, guarded) == train(scenario)
    (note,) = [event for event in events if "planted" in event.message]
    assert note.step == 3
    assert "the guard failed in its sensor trend (now off) and does without it" in note.message
    assert "planted" in capsys.readouterr().err
    assert guards[0].coverage()["failures"] == {"sensor trend (now off)": "ZeroDivisionError: planted"}


def test_a_scripted_model_is_declined_with_what_to_do() -> None:
    model = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(bw.UsageError, match=r"a scripted module.*call it inside a module of your own"):
        bw.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1)).start()
