"""Calls of a model that only one run has, or has with gradients; micro-batches that are lost; fused ports with other names.

All of it was seen in scripts that others wrote.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw
from bitwitness.cli import main
from bitwitness.store.opening import open_source


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))


def batches(steps: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        now = torch.randn(20, 6, generator=generator)
        yield now, now + 0.1 * torch.randn(20, 6, generator=generator), torch.randn(20, generator=generator)


def recorded(out: Path, step: Callable[..., torch.Tensor], *models: nn.Module, trained: int = 0) -> Path:
    """Record all models while one of them is trained."""
    optimizer = torch.optim.SGD(models[trained].parameters(), lr=0.05)
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(bw.Recorder(model, out=out))
        for batch in batches():
            optimizer.zero_grad()
            step(*models, *batch).backward()
            optimizer.step()
    return out


def said_of(a: Path, b: Path, capsys: Any) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["compare", str(a), str(b)])
    return code, capsys.readouterr().out


def loss_of(q: nn.Module, now: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.smooth_l1_loss(q(now)[:, 0], target)


def ungraded(q: nn.Module, now: torch.Tensor, then: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = reward + 0.9 * q(then).max(1).values
    return loss_of(q, now, target)


def graded(q: nn.Module, now: torch.Tensor, then: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    return loss_of(q, now, reward + 0.9 * q(then).max(1).values)


def detached(q: nn.Module, now: torch.Tensor, then: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    return loss_of(q, now, (reward + 0.9 * q(then).max(1).values).detach())


def test_a_target_that_is_not_detached_is_told_of_as_that(tmp_path: Path) -> None:
    a, b = (recorded(tmp_path / name, step, critic()) for name, step in (("a", ungraded), ("b", graded)))
    report = bw.compare(a, b)
    assert "only run B goes backward here" in report.conclusion
    assert (
        "what the other run detaches, makes without gradients, or has another backward of its own for"
        in report.conclusion
    )
    same = bw.compare(a, recorded(tmp_path / "c", detached, critic()))
    assert same.status == "fine"


def test_an_evaluation_between_forward_and_backward_leaves_the_backward_recorded(tmp_path: Path) -> None:
    """Distillation from itself, a consistency loss, a target that is made after the forward."""

    def step(q: nn.Module, now: torch.Tensor, then: torch.Tensor, _reward: torch.Tensor) -> torch.Tensor:
        made = q(now)
        with torch.no_grad():
            target = q(then)
        return F.mse_loss(made, target)

    a = recorded(tmp_path / "a", step, critic())
    rows = rows_of(a)
    said = {(row["op"], row["phase"]) for row in rows if row["kind"] == "op"}
    assert ("mse_loss", "forward") in said
    assert ("mse_loss_backward", "backward") in said
    assert sum(row["op"] == "addmm" and row["step"] == 0 for row in rows if row["slot"] == "out0") == 2  # once a layer


def rows_of(run: Path) -> list[dict[str, Any]]:
    source = open_source(run)
    return [row for step in source.steps(0) for row in source.table(0, step).to_pylist()]


def test_a_frozen_network_counts_its_steps_whether_or_not_gradients_are_on(tmp_path: Path, capsys: Any) -> None:
    def run(name: str, *, without: bool) -> Path:
        q = critic()
        target = copy.deepcopy(q).requires_grad_(False)

        def step(t: nn.Module, q: nn.Module, now: torch.Tensor, then: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
            if without:
                with torch.no_grad():
                    aim = r + 0.9 * t(then).max(1).values
            else:
                aim = r + 0.9 * t(then).max(1).values
            return loss_of(q, now, aim)

        return recorded(tmp_path / name, step, target, q, trained=1)

    code, said = said_of(run("a", without=True), run("b", without=False), capsys)
    assert code == 0, said
    assert said.startswith("no difference")


def gan(out: Path, fake: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Path:
    torch.manual_seed(2)
    g, d = (
        nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)),
        nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 1)),
    )
    of_g, of_d = (torch.optim.Adam(net.parameters(), 1e-3) for net in (g, d))
    with bw.Recorder(g, out=out), bw.Recorder(d, out=out):
        for noise, real, _ in batches():
            loss = F.softplus(-d(real)).mean() + F.softplus(d(fake(g, noise))).mean()
            of_d.zero_grad()
            loss.backward()
            of_d.step()
            of_g.zero_grad()
            F.softplus(-d(g(noise))).mean().backward()
            of_g.step()
    return out


def test_a_call_whose_result_is_detached_is_no_micro_batch(tmp_path: Path, capsys: Any) -> None:
    def ungraded_fake(g: nn.Module, noise: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return g(noise)

    a, b = gan(tmp_path / "a", ungraded_fake), gan(tmp_path / "b", lambda g, noise: g(noise).detach())
    code, said = said_of(a, b, capsys)
    assert code == 0, said
    assert "calls of the model from which no gradient comes back were left out" in said


def test_a_penalty_by_autograd_is_no_micro_batch_either(tmp_path: Path) -> None:
    """Its gradient is one that a loss is made of; by hand it takes no call of the model."""

    def penalty(d: nn.Module, points: torch.Tensor) -> torch.Tensor:
        points = points.clone().requires_grad_()
        (slope,) = torch.autograd.grad(d(points).sum(), points, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def by_hand(d: Any, points: torch.Tensor) -> torch.Tensor:
        inside = points @ d[0].weight.t() + d[0].bias
        slope = ((1 - torch.tanh(inside).square()) * d[2].weight.sum(0)) @ d[0].weight
        return (slope.norm(dim=1) - 1).square().mean()

    def step_with(of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda d, now, then, _r: of(d, then) + d(now).mean()

    a, b = (recorded(tmp_path / name, step_with(of), critic()) for name, of in (("a", penalty), ("b", by_hand)))
    assert bw.compare(a, b).status == "fine"


def accumulated(out: Path, parts: int, *, lost: bool = False) -> Path:
    net = critic()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    with bw.Recorder(net, out=out):
        for now, _, reward in batches():
            optimizer.zero_grad()
            for x, y in zip(now.chunk(parts), reward.chunk(parts), strict=True):
                if lost:
                    optimizer.zero_grad()
                (F.mse_loss(net(x)[:, 0], y) / parts).backward()
            optimizer.step()
    return out


def test_micro_batches_that_are_lost_are_told_of(tmp_path: Path) -> None:
    whole, four = accumulated(tmp_path / "one", 1), accumulated(tmp_path / "four", 4)
    lost = accumulated(tmp_path / "lost", 4, lost=True)
    assert bw.compare(whole, four).status == "fine"
    for right in (whole, four):
        report = bw.compare(right, lost)
        assert report.first is not None
        assert report.first.reason == "dropped"
        assert "the gradients of run B are those of the last of its 4 micro-batches alone" in report.conclusion
        assert bw.compare(lost, right).conclusion.count("the gradients of run A are those of the last") == 1


class Separate(nn.Module):
    """Attention and a gated layer beside it, a product each."""

    def __init__(self) -> None:
        super().__init__()
        self.n = nn.LayerNorm(24)
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.g, self.u, self.dn = nn.Linear(24, 48), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.n(x)
        attended = F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))
        return x + self.o(attended) + self.dn(F.silu(self.g(y)) * self.u(y))


class Fused(nn.Module):
    """The same with two products for five, and other names for what is left."""

    def __init__(self, old: Separate) -> None:
        super().__init__()
        self.n, self.out, self.proj = old.n, old.o, old.dn
        self.qkv, self.gate_up = nn.Linear(24, 72), nn.Linear(24, 96)
        with torch.no_grad():
            for new, parts in ((self.qkv, (old.q, old.k, old.v)), (self.gate_up, (old.g, old.u))):
                new.weight.copy_(torch.cat([part.weight for part in parts]))
                new.bias.copy_(torch.cat([part.bias for part in parts]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.n(x)
        gate, up = self.gate_up(y).chunk(2, -1)
        return x + self.out(F.scaled_dot_product_attention(*self.qkv(y).chunk(3, -1))) + self.proj(F.silu(gate) * up)


def test_a_port_that_fuses_most_products_is_known_by_the_weights_that_are_left(tmp_path: Path) -> None:
    def run(name: str, *, fused: bool) -> Path:
        torch.manual_seed(4)
        blocks = [Separate(), Separate()]
        parts = [Fused(block) if fused else block for block in blocks]
        torch.manual_seed(6)
        net = nn.Sequential(nn.Linear(6, 24), *parts, nn.Linear(24, 2))
        optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
        torch.manual_seed(5)
        with bw.Recorder(net, out=tmp_path / name):
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(5, 12, 6)).square().mean().backward()
                optimizer.step()
        return tmp_path / name

    report = bw.compare(run("a", fused=False), run("b", fused=True))
    assert report.status == "fine", report.conclusion


def test_a_target_network_that_is_moved_otherwise_is_named_before_who_reads_it(tmp_path: Path, capsys: Any) -> None:
    def run(name: str, keep: float) -> Path:
        torch.manual_seed(0)
        online = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 3))
        target = copy.deepcopy(online).requires_grad_(False)
        optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
        with bw.Recorder(online, out=tmp_path / name), bw.Recorder(target, out=tmp_path / name):
            for first, second, _ in batches(4):
                loss = torch.zeros(())
                for u, v in ((first, second), (second, first)):  # each of the target's calls counts for it as a step
                    with torch.no_grad():
                        aim = F.normalize(target(v), dim=1)
                    loss = loss + 2 - 2 * (F.normalize(online(u), dim=1) * aim).sum(1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for t, o in zip(target.parameters(), online.parameters(), strict=True):
                        t.mul_(keep).add_(o, alpha=1 - keep)
        return tmp_path / name

    code, said = said_of(run("a", 0.97), run("b", 0.03), capsys)
    assert code == 1
    assert said.startswith("beside them, a-2 against b-2 (Sequential): the runs part at ")
    assert "so it was changed between these two steps" in said.splitlines()[0]


class Root(torch.autograd.Function):
    """The root mean square taken out, with a backward written by hand."""

    whole = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, r)
        return x * r

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, r = ctx.saved_tensors
        straight = grad * r
        if not Root.whole:
            return straight
        return straight - x * r.pow(3) * (grad * x).mean(-1, keepdim=True)  # the line that is missing


def test_the_line_of_a_backward_by_hand_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(Root.apply(self.a(x)))

    def run(name: str) -> Path:
        torch.manual_seed(0)
        return recorded(tmp_path / name, lambda net, now, _then, _r: net(now).square().mean(), Normed())

    a = run("a")
    monkeypatch.setattr(Root, "whole", False)
    report = bw.compare(a, run("b"))
    assert report.first is not None
    where, _, function = report.first.line.partition(" in ")
    assert function == "backward"
    line = Path(__file__).read_text(encoding="utf-8").splitlines()[int(where.rpartition(":")[2]) - 1]
    assert line.endswith("# the line that is missing")


class Counted(nn.Module):
    """Divides by a number that it is given, as a trainer's models do, or by its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = critic()

    def forward(self, x: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        errors = self.net(x).square()
        return errors.mean() if count is None else errors.sum() / count


def test_an_argument_of_which_the_loss_knows_nothing_is_not_said_first(tmp_path: Path) -> None:
    def run(name: str, *, counts: bool, clips: bool = False) -> Path:
        torch.manual_seed(0)
        model = Counted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with bw.Recorder(model, out=tmp_path / name):
            for now, _, _ in batches():
                optimizer.zero_grad()
                (model(now, torch.tensor(now.shape[0] * 3)) if counts else model(now)).backward()
                if clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
        return tmp_path / name

    report = bw.compare(run("a", counts=True), run("b", counts=False, clips=True))
    assert report.conclusion.startswith("the runs part at ./gradients#0:grad.read"), report.conclusion


def actor_and_critic(out: Path, *, actor_first: bool) -> Path:
    torch.manual_seed(0)
    actor, judge = (nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, n)) for n in (3, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *judge.parameters()], lr=1e-3)
    first, second = (actor, judge) if actor_first else (judge, actor)
    with bw.Recorder(first, out=out), bw.Recorder(second, out=out):
        for now, _, reward in batches():
            made = {model: model(now) for model in (first, second)}
            loss = (made[judge][:, 0] - reward).square().mean() + made[actor].logsumexp(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return out


def test_models_that_are_called_in_another_order_are_known_by_their_weights(tmp_path: Path, capsys: Any) -> None:
    a, b = (actor_and_critic(tmp_path / name, actor_first=first) for name, first in (("a", True), ("b", False)))
    code, said = said_of(a, b, capsys)
    assert code == 0, said
    assert "a is held against b-2, which is its model, and so are the others" in said
    assert "beside them, a-2 against b (Sequential): " in said
    assert said_of(a, a.rename(tmp_path / "c"), capsys)[0] != 0  # a folder that is not there


class Members(nn.Module):
    """Some networks of one kind, one by one or all at once."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.members = nn.ModuleList(critic() for _ in range(3))
        self.at_once = at_once
        for number, member in enumerate(self.members):
            with torch.no_grad():
                member[0].weight.mul_(1 + number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.at_once:
            return torch.stack([member(x) for member in self.members])
        stacked = {
            name: torch.stack([dict(member.named_parameters())[name] for member in self.members])
            for name, _ in self.members[0].named_parameters()
        }
        one = self.members[0]
        return torch.func.vmap(lambda values: torch.func.functional_call(one, values, (x,)))(stacked)


def test_parameters_that_a_call_exchanges_are_the_models_own(tmp_path: Path) -> None:
    def step(net: nn.Module, now: torch.Tensor, _then: torch.Tensor, _reward: torch.Tensor) -> torch.Tensor:
        return net(now).square().mean()

    a, b = (recorded(tmp_path / name, step, Members(at_once=at_once)) for name, at_once in (("a", False), ("b", True)))
    report = bw.compare(a, b)
    assert "parameters of their own" not in report.conclusion
    assert report.status == "fine", report.conclusion


class Gated(nn.Module):
    """Two causal convolutions, padded before; or (``cut``) on both sides, and cut behind."""

    def __init__(self, *, cut: bool = False, wrong: bool = False) -> None:
        super().__init__()
        self.cut = cut
        torch.manual_seed(3)
        padding = 2 if cut else 0
        self.filter = nn.Conv1d(8, 8, 2, dilation=2, padding=padding)
        self.gate = nn.Conv1d(8, 8, 2, dilation=1 if wrong else 2, padding=padding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if self.cut:
            return self.filter(x)[..., :size].tanh() * self.gate(x)[..., :size].sigmoid()
        return self.filter(F.pad(x, (2, 0))).tanh() * self.gate(F.pad(x, (2, 0))).sigmoid()


def test_a_rewrite_beside_what_is_wrong_is_not_accused_for_its_backward(tmp_path: Path) -> None:
    """All gradients differ behind the mistake; that of what is written otherwise and agrees in the forward, too."""

    def step(net: nn.Module, now: torch.Tensor, _then: torch.Tensor, _reward: torch.Tensor) -> torch.Tensor:
        return net(now.view(1, 20, 6)[:, :8]).square().mean()

    a = recorded(tmp_path / "a", step, Gated())
    assert bw.compare(a, recorded(tmp_path / "b", step, Gated(cut=True))).status == "fine"
    report = bw.compare(a, recorded(tmp_path / "c", step, Gated(cut=True, wrong=True)))
    assert report.first is not None
    assert "gate/convolution#0:forward" in report.conclusion, report.conclusion
