"""Ports and refactorings that merge, exchange or re-order what they compute: healthy ones, and where one thing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def record(out: Path, model: nn.Module, loss: Loss, *, optimizer: type[Any] = torch.optim.SGD, steps: int = 3) -> Path:
    stepper = optimizer(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out):
        for _ in range(steps):
            stepper.zero_grad()
            loss(model, torch.randn(6, 10, 24, generator=generator)).backward()
            stepper.step()
    return out


def compared(folder: Path, models: tuple[nn.Module, nn.Module], losses: tuple[Loss, Loss], **settings: Any) -> Any:
    runs = [
        record(folder / name, model, loss, **settings) for name, model, loss in zip("ab", models, losses, strict=True)
    ]
    return bw.compare(*runs)


class Separate(nn.Module):
    """Gate and up as two products; the queries, keys and values as three."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((24, 72), (24, 72), (72, 24)))
        self.first, self.second = nn.LayerNorm(24), nn.LayerNorm(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        scores = (self.q(y) @ self.k(y).transpose(-1, -2) / 24**0.5).softmax(-1)
        x = x + self.o(scores @ self.v(y))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Fused(nn.Module):
    """The same with one product for each; that of the queries is as large as the other's gate."""

    def __init__(self, old: Separate, scale: float = 1.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.qkv, self.out = nn.Linear(24, 72, bias=False), nn.Linear(24, 24, bias=False)
        self.gate_up, self.last = nn.Linear(24, 144, bias=False), nn.Linear(72, 24, bias=False)
        self.scale = scale
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([old.q.weight, old.k.weight, old.v.weight]))
            self.gate_up.weight.copy_(torch.cat([old.gate.weight, old.up.weight]))
            self.out.weight.copy_(old.o.weight)
            self.last.weight.copy_(old.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, scale=self.scale / 24**0.5))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.last(F.silu(gate) * up)


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_fused_weights_are_not_taken_for_others_of_their_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    old = Separate()
    report = compared(tmp_path, (old, Fused(old)), (square, square))
    assert not report.suspects, report.conclusion


def test_a_wrong_scale_beside_fused_weights_is_found_in_the_attention(tmp_path: Path) -> None:
    torch.manual_seed(0)
    old = Separate()
    report = compared(tmp_path, (old, Fused(old, scale=1.5)), (square, square))
    assert report.status != "fine"
    assert "./bmm#0:forward.in0" in report.conclusion, report.conclusion  # the first product of the attention


def two_heads() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(24, 8), "b": nn.Linear(24, 8)})


def divergence(first: str, second: str, *, swapped: bool) -> Loss:
    """Return a loss that computes its parts in one order or the other."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        logits = {"a": model["a"](x), "b": model["b"](x)}
        scaled = {name: logits[name] / 3.0 for name in (("b", "a") if swapped else ("a", "b"))}
        logs = {name: scaled[name].log_softmax(-1) for name in (("b", "a") if swapped else ("a", "b"))}
        return (logs[first].exp() * (logs[first] - logs[second])).sum(-1).mean()

    return loss


@pytest.mark.parametrize("wrong", [False, True])
def test_lines_that_are_exchanged_are_no_difference_and_their_meaning_is(tmp_path: Path, wrong: bool) -> None:
    losses = (
        divergence("a", "b", swapped=False),
        divergence(*(("b", "a") if wrong else ("a", "b")), swapped=True),
    )
    report = compared(tmp_path, (two_heads(), two_heads()), losses)
    assert (report.status == "fine") is not wrong, report.conclusion
    assert "another view" not in report.conclusion
    if wrong:
        assert report.first.site.startswith("./"), report.conclusion


def test_factors_of_a_product_may_be_exchanged(tmp_path: Path) -> None:
    def entropy(turn: bool) -> Loss:
        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            logs = model(x).log_softmax(-1)
            p = logs.softmax(-1) if turn else logs.exp()
            return -((logs * p) if turn else (p * logs)).sum(-1).mean()

        return loss

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Linear(24, 8))
    report = compared(tmp_path, (models[0], models[1]), (entropy(turn=False), entropy(turn=True)))
    assert report.status == "fine", report.conclusion


def test_terms_of_which_one_has_a_factor_are_not_exchanged(tmp_path: Path) -> None:
    def loss(swapped: bool) -> Loss:
        def of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            first, second = model["a"](x), model["b"](x)
            return (torch.add(second, first, alpha=2) if swapped else torch.add(first, second, alpha=2)).square().mean()

        return of

    report = compared(tmp_path, (two_heads(), two_heads()), (loss(swapped=False), loss(swapped=True)))
    assert report.status == "findings"
    assert report.first.site.startswith("./add"), report.conclusion


class Turned(nn.Module):
    """Scores depend on the differences of positions alone, from wherever these are counted."""

    def __init__(self, start: int, *, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(24, 24) for _ in range(3))
        self.start, self.wrong = start, wrong

    def rotary(self, x: torch.Tensor, start: int) -> torch.Tensor:
        places = torch.arange(x.shape[-2]) + start
        angles = torch.outer(places.float(), 1.0 / 100 ** (torch.arange(12) / 12))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.rotary(self.q(x), self.start), self.rotary(self.k(x), self.start + self.wrong)
        return F.scaled_dot_product_attention(q, k, self.v(x))


@pytest.mark.parametrize("wrong", [False, True])
def test_an_argument_of_which_nothing_is_left_is_a_way_of_writing(tmp_path: Path, wrong: bool) -> None:
    report = compared(tmp_path, (Turned(0), Turned(7, wrong=wrong)), (square, square))
    assert (report.status == "fine") is not wrong, report.conclusion


class SGD(torch.optim.SGD):
    """Another class of the same name, with fewer settings and a state of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("seen", torch.zeros(1)).add_(1)
                p.sub_(group["lr"] * p.grad)


def test_settings_that_only_one_class_of_a_name_has_are_no_difference(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(24, 24), nn.Linear(24, 24)
    other.load_state_dict(one.state_dict())
    runs = [
        record(tmp_path / name, model, square, optimizer=kind)
        for name, model, kind in (("a", one, torch.optim.SGD), ("b", other, SGD))
    ]
    report = bw.compare(*runs)
    assert report.status == "fine", report.conclusion


class Adapter(nn.Module):
    """A low-rank adapter that is zero at first: under any scale it returns the same, and its gradient has it."""

    def __init__(self, scale: float, *, merged: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(24, 24).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(4, 24)), nn.Parameter(torch.zeros(24, 4))
        self.scale, self.merged = scale, merged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + self.scale * self.up @ self.down, self.base.bias)
        return self.base(x) + (x @ self.down.T @ self.up.T) * self.scale


def test_a_factor_of_an_adapter_is_not_the_losss(tmp_path: Path) -> None:
    def model(scale: float, *, merged: bool) -> nn.Module:
        return nn.Sequential(Adapter(scale, merged=merged), nn.Tanh(), Adapter(scale, merged=merged))

    report = compared(tmp_path, (model(2.0, merged=False), model(5.0, merged=True)), (square, square))
    assert "2.5 times as large in run B" in report.conclusion
    assert "the loss agrees, and so does what comes back to" in report.conclusion
    assert "a factor of the loss" not in report.conclusion


def test_what_one_run_gives_by_name_and_the_other_by_position_is_given(tmp_path: Path) -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x * mask)

    def by(name: bool) -> Loss:
        mask = torch.ones(24)
        return lambda model, x: (
            (model(x=x, mask=mask) if name else model(x, mask)).square().mean() * (1.0 if name else 1.5)
        )

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Named(24, 8))
    report = compared(tmp_path, (models[0], models[1]), (by(name=True), by(name=False)))
    assert "is given" not in report.conclusion, report.conclusion
    assert report.status != "fine"
