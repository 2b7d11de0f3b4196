"""A skipped step: the script may read its gradients, and no optimizer is any other for them."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.stats import bit_hash
from bitwitness.testing import FaultyDevice, from_mapping

STEPS, STRUCK = 10, 7
FAULT = {
    "site": "0/addmm:forward", "steps": [STRUCK], "times": 1, "kind": "multiply", "factor": 1e6, "pattern": "all",
}  # fmt: skip


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as many people's optimizers do, whether there are gradients or not."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in group["params"]:
                parameter.data.mul_(1.0 if parameter.grad is None else 1.0 - 0.001 * group["k"])
        return loss


MAKERS: dict[str, Callable] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "counting": lambda p: Counting(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 4))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(STEPS)]


def state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list:
    told = [int(bit_hash(p.detach())) for p in model.parameters()]
    for optimizer in optimizers:
        for row in optimizer.state.values():
            told += [int(bit_hash(v.detach())) if isinstance(v, torch.Tensor) else v for v in row.values()]
        told += [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return told


class Loop:
    """A training loop of one kind, which logs its gradients before and after the optimizers' steps."""

    def __init__(self, make: Callable, kind: str) -> None:
        self.kind = kind
        self.model = build()
        parts = [self.model[0].parameters(), self.model[2].parameters()]
        self.optimizers = [make(part) for part in (parts if kind == "two" else [self.model.parameters()])]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 100) for o in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=kind == "scaler")
        self.norms: list[list[float]] = []
        self.mean, self.variance = torch.zeros(4), torch.ones(4)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.model(x)
        # It keeps running statistics, which nobody can put back: such loss code is not run again, so no heal is possible.
        kept = nn.functional.batch_norm(out.detach(), self.mean, self.variance, training=True)
        loss = (out - y).square().mean() + 0.0 * kept.mean()
        self.scaler.scale(loss).backward()
        return loss

    def prepare(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.kind != "zeros")
        self.backward(x, y)
        if self.kind == "clip":
            nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
        if self.kind == "replaced":
            nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
            for p in self.model.parameters():
                p.grad = p.grad * 1.0

    def log(self) -> None:
        self.norms.append([float(p.grad.norm()) for p in self.model.parameters()])

    def step(self, x: torch.Tensor, y: torch.Tensor, *, omitted: bool) -> None:
        if self.kind == "closure":
            if not omitted:
                self.optimizers[0].step(lambda: (self.optimizers[0].zero_grad(), self.backward(x, y))[1])
            return
        self.prepare(x, y)
        self.log()
        if omitted:
            return
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            self.scaler.step(optimizer)
            scheduler.step()
        self.scaler.update()
        self.log()


def train(make: Callable, kind: str, *, guarded: bool, without: int | None = None) -> tuple[list, list, list]:
    """Train; return the final state, the gradients' norms as a script logs them, and the verdicts."""
    loop = Loop(make, kind)
    guard = bw.Guard(loop.model, act="protect", deep_every=0, trend={"warmup": 4}, self_test=False) if guarded else None
    with guard or nullcontext():
        for number, (x, y) in enumerate(batches()):
            loop.step(x, y, omitted=number == without)
    return state(loop.model, loop.optimizers), loop.norms, guard.coverage()["verdicts"] if guard else []


CASES = [*((name, "plain") for name in MAKERS)]
CASES += [("adamw", kind) for kind in ("two", "zeros", "clip", "replaced", "closure", "scaler")] + [("fused", "scaler")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_skipped_step_leaves_gradients_to_be_read_and_optimizers_as_they_were(name: str, kind: str) -> None:
    make = MAKERS[name]
    expected, *_ = train(make, kind, guarded=False, without=STRUCK)
    with FaultyDevice(from_mapping({"fault": [FAULT]})) as device, warnings.catch_warnings():
        warnings.simplefilter("error")
        found, norms, verdicts = train(make, kind, guarded=True)
    assert len(device.fired) == 1
    assert verdicts == [f"step {STRUCK}: transient_hardware [0] skipped"]
    assert found == expected
    assert all(all(row) for row in norms)


def test_what_a_wrong_backward_gave_to_a_loose_parameter_is_not_in_the_norm_that_clips(capsys) -> None:
    def run() -> tuple[list[torch.Tensor], torch.Tensor, list[float]]:
        torch.manual_seed(0)
        net, warmth = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Parameter(torch.zeros(()))
        optimizer, norms = torch.optim.SGD([*net.parameters(), warmth], lr=0.01), []
        with bw.Guard(net, act="protect", deep_every=0, trend={"z": 1e-9, "warmup": 1}, self_test=False):
            for x, y in batches():
                optimizer.zero_grad()
                (net(x) * warmth.exp() - y).square().mean().backward()
                norms.append(float(nn.utils.clip_grad_norm_([*net.parameters(), warmth], 0.5)))
                optimizer.step()
        return [p.detach().clone() for p in net.parameters()], warmth.detach(), norms

    fault = FAULT | {"site": "2/addmm:forward", "factor": 1e30, "pattern": "all"}
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        weights, warmth, norms = run()
    assert len(device.fired) == 1
    said = capsys.readouterr().err
    assert "healed with it; 1 parameters outside the model, which the same backward reached, are not stepped" in said
    assert all(bool(p.isfinite().all()) for p in [*weights, warmth])
    assert max(norms) < 1e3


class TwoModels:
    """Two models in one backward, each with a guard and an optimizer of its own; ``second`` reads what ``first`` gives."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (self.first, self.second)]

    def step(self, x: torch.Tensor, y: torch.Tensor, clip: float | None, omitted: nn.Module | None) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (self.second(self.first(x)) - y).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_([*self.first.parameters(), *self.second.parameters()], clip)
        for optimizer in self.optimizers:
            if omitted is None or optimizer.param_groups[0]["params"][0] is not next(omitted.parameters()):
                optimizer.step()


def test_what_a_wrong_backward_gave_to_another_model_is_not_stepped(capsys) -> None:
    both = TwoModels()
    fault = FAULT | {"site": "2/addmm:forward"}
    with (
        FaultyDevice(from_mapping({"fault": [fault]})) as device,
        bw.Guard(both.second, act="protect", deep_every=0, trend={"z": 1e-9, "warmup": 1}, self_test=False),
    ):
        for x, y in batches():
            both.step(x, y, 1e9, None)
    assert len(device.fired) == 1
    said = capsys.readouterr().err
    assert "healed with it; 2 parameters outside the model, which the same backward reached, are not stepped" in said
    (struck,) = re.findall(r"VERDICT step (\d+): transient_hardware, action healed", said)
    plain = TwoModels()
    for number, (x, y) in enumerate(batches()):
        plain.step(x, y, 1e9, plain.first if number == int(struck) else None)
    for one, other in ((both.first, plain.first), (both.second, plain.second)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_it_is_said_where_another_model_was_stepped_before_the_guard_could_look(capsys) -> None:
    both = TwoModels()
    with (
        FaultyDevice(from_mapping({"fault": [FAULT | {"site": "2/addmm:forward"}]})) as device,
        bw.Guard(both.second, act="protect", deep_every=0, trend={"z": 1e-9, "warmup": 1}, self_test=False),
    ):
        for x, y in batches():
            both.step(x, y, None, None)  # the first model's optimizer steps before the second's
    assert len(device.fired) == 1
    said = capsys.readouterr().err
    assert "healed with it; 2 parameters outside the model were stepped with what the same backward gave them" in said


def test_two_models_of_one_backward_are_each_healed_by_their_own_guard(capsys) -> None:
    plain = TwoModels()
    for x, y in batches():
        plain.step(x, y, None, None)
    both = TwoModels()
    often = {"act": "protect", "deep_every": 0, "trend": {"z": 1e-9, "warmup": 1}, "self_test": False}
    fault = FAULT | {"site": "2/addmm:forward"}
    with (
        FaultyDevice(from_mapping({"fault": [fault]})) as device,
        bw.Guard(both.first, **often),
        bw.Guard(both.second, **often),
    ):
        for x, y in batches():
            both.step(x, y, None, None)
    assert len(device.fired) == 1
    said = capsys.readouterr().err
    verdicts = [line for line in said.splitlines() if "VERDICT" in line]
    assert len(verdicts) == 2
    assert all("healed with it [faults are injected here" in line for line in verdicts)
    for one, other in ((both.first, plain.first), (both.second, plain.second)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)), said


def test_what_a_healed_backward_gave_to_a_model_that_has_its_own_is_cleared_by_the_script(capsys) -> None:
    """A generator's backward goes through the discriminator, whose gradients the script clears before its own."""

    def run() -> tuple[list[int], list[int]]:
        torch.manual_seed(0)
        generator = nn.Sequential(OrderedDict(a=nn.Linear(8, 16), b=nn.ReLU(), last=nn.Linear(16, 4)))
        critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (critic, generator))
        with bw.Guard(generator, act="protect", deep_every=0, trend={"z": 1e-9, "warmup": 1}, self_test=False):
            for x, y in batches():
                made = generator(x + y.sum())
                ours.zero_grad()
                critic(made).square().mean().backward()
                ours.step()
                theirs.zero_grad()
                (critic(y).mean() - critic(x[:, :4]).mean()).backward()
                theirs.step()
        return tuple([int(bit_hash(p.detach())) for p in model.parameters()] for model in (generator, critic))

    expected = run()
    fault = {key: value for key, value in FAULT.items() if key != "steps"} | {
        "site": "last/addmm:forward",
        "from_step": STRUCK,
    }
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        found = run()
    said = capsys.readouterr().err
    assert len(device.fired) == 1
    assert "healed with it; 4 parameters outside the model, which the same backward reached, are not stepped" in said
    assert found == expected
