"""Steps that a script skips by itself because their numbers are not finite: a run with such is not called healthy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.capture.unused import UnusedLosses
from bitwitness.cli import main

BAD = 6
Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], None]


def skips_at_the_loss(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    loss = net(x).square().mean()
    if torch.isfinite(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def skips_at_the_gradients(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    net(x).square().mean().backward()
    if all(parameter.grad.isfinite().all() for parameter in net.parameters()):
        optimizer.step()
    optimizer.zero_grad()


def adds_two_losses(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Compute a loss before the next forward, and use both."""
    first = net(x.nan_to_num()).square().mean()
    second = net(-x.nan_to_num()).square().mean()
    optimizer.zero_grad()
    (first + second).backward()
    optimizer.step()


def looks_at_another_loss(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Compute, with a graph, a number that is only looked at."""
    net(x.nan_to_num()).abs().mean().item()
    adds_two_losses(net, optimizer, x)


def train(step: Step, *, steps: int = 20, bad: int = BAD, **settings) -> bw.Guard:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    with bw.Guard(net, optimizer, self_test=False, **settings) as guard:
        for number in range(steps):
            x = torch.randn(4, 8)
            if number == bad:
                x[2, 3] = float("nan")
            step(net, optimizer, x)
    return guard


@pytest.mark.parametrize("step", [skips_at_the_loss, skips_at_the_gradients])
@pytest.mark.parametrize("steps", [BAD + 1, 20], ids=["at the end", "on the way"])
def test_what_the_script_skips_is_told_and_the_run_is_not_healthy(
    step: Step, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = train(step, steps=steps, out=tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("the loss was not finite in step 6 (nan), and the script let it go unused") == 1
    assert "'bitwitness trace' names who made it" in said
    assert "NOT healthy: 1 step with NaN or Inf" in said
    assert not guard.verdicts
    assert main(["status", str(tmp_path / "run")]) == 1
    assert "(the loss was not finite in step 6 (nan)" in capsys.readouterr().out


@pytest.mark.parametrize("step", [adds_two_losses, looks_at_another_loss, skips_at_the_loss])
def test_losses_that_are_used_later_or_are_finite_are_no_matter(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    train(step, bad=-1)
    said = capsys.readouterr().err
    assert "unused" not in said
    assert ": healthy" in said or "] healthy" in said


def test_a_bad_loss_is_not_forgotten_where_nobody_asks_for_long() -> None:
    losses = UnusedLosses()
    for step in range(5000):
        losses.add(step, [torch.tensor(float("inf") if step == 3 else 1.0)])
    assert len(losses._kept) < 1000
    assert losses.not_finite() == [(3, float("inf"))]
    assert losses.not_finite() == []


def test_who_does_not_look_for_nan_is_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    train(skips_at_the_loss, nonfinite={"enabled": False})
    assert "not finite" not in capsys.readouterr().err


class Probable(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


@pytest.mark.parametrize("inside", [True, False], ids=["the model's output", "what the script made of it"])
@pytest.mark.parametrize("face", [bw.Guard, bw.NonfiniteTracer])
def test_what_makes_a_loss_function_raise_is_told(
    face: Any, inside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = (Probable if inside else nn.Sequential)(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters())

    def train(bad: int) -> None:
        for number in range(8):
            x = torch.rand(4, 8)
            if number == bad:
                x[2, 3] = float("nan")
            optimizer.zero_grad()
            out = net(x)
            nn.functional.binary_cross_entropy(out if inside else out.sigmoid(), torch.ones(4, 1)).backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match="between 0 and 1"), face(net, out=tmp_path / "run"):
        train(BAD)
    said = capsys.readouterr().err
    assert f"NOT healthy: 1 {'step with' if face is bw.Guard else 'origin of'} NaN or Inf" in said
    if face is bw.Guard:
        assert "step 6: what the model returned was not finite (nan), and the script failed before its backward" in said
        assert "to do: run it with 'bitwitness trace', which names the operator and the line" in said
    else:
        assert "step 6: FIRST NON-FINITE VALUE: the batch was not finite" in said
        assert "to do: look at what is named" in said
    assert main(["status", str(tmp_path / "run")]) == 1


@pytest.mark.parametrize("face", [bw.Guard, bw.NonfiniteTracer])
def test_another_error_of_a_script_is_no_matter(face: Any, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(net.parameters())

    def train() -> None:
        for _ in range(4):
            net(torch.rand(4, 8)).sum().backward()
            optimizer.step()
        net(torch.rand(4, 8))
        raise ValueError("of the script's")

    with pytest.raises(ValueError, match="of the script's"), face(net):
        train()
    assert "healthy until the script failed" in capsys.readouterr().err
