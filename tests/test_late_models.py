"""Models that a script makes or trains after others: their first steps are seen, or it is said that they were not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bitwitness.config import load_config
from bitwitness.guard.auto import AutoGuard


def auto(out: Path) -> AutoGuard:
    return AutoGuard(load_config(None, {"self_test": False, "out": str(out)}).config)


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(net: nn.Module, steps: int = 4, *, bad: int = -1) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(steps):
        x = torch.randn(3, 4)
        if number == bad:
            x[0] = float("nan")
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kept", [True, False], ids=["beside the first", "in its place"])
def test_a_model_that_is_made_later_is_watched_from_its_first_step_on(
    kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with auto(tmp_path / "run"):
        folds = []
        for fold in range(3):
            net = made()
            folds += [net] * kept
            train(net, bad=0 if fold == 2 else -1)
    told = capsys.readouterr().err
    assert told.count("4 of 4 parameters, 4 steps") == 3
    assert "model 3] VERDICT step 0: data" in told
    assert "the batch of rank 0 holds NaN or Inf" in told
    assert "went by before" not in told


def test_steps_of_a_model_that_is_found_late_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = made(), made()
    with auto(tmp_path / "run"):
        train(first)
        train(second)
    told = capsys.readouterr().err
    assert "4 of 4 parameters, 4 steps" in told
    assert "model 2] healthy: 4 of 4 parameters, 3 steps" in told
    assert "model 2] not covered: its first step went by before this model was found" in told


def test_modules_that_a_forward_makes_keep_no_search_going(tmp_path: Path) -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.Sequential(nn.Tanh(), nn.Identity())(self.inner(x))

    with auto(tmp_path / "run") as found:
        train(Makes())
        assert found._resting


def test_the_step_that_a_closures_model_is_found_in_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, x = made(), torch.randn(16, 4)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = net(x).square().mean() * (float("nan") if calls == 1 else 1.0)
        loss.backward()
        return loss

    with auto(tmp_path / "run"):
        for _ in range(3):
            optimizer.step(closure)
    told = capsys.readouterr().err
    assert "not covered: its first step went by before this model was found" in told
    assert "unused" not in told


def test_a_part_that_its_optimizer_steps_later_is_found_when_it_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2), "late": nn.Linear(4, 3)})
    optimizer = torch.optim.Adam(parts.parameters(), lr=0.01)
    with auto(tmp_path / "run") as found:
        for step in range(8):
            hidden = torch.relu(parts["body"](torch.randn(8, 4)))
            optimizer.zero_grad()
            parts["head"](hidden).square().mean().backward()
            if step in (3, 5):
                late = parts["late"](hidden.detach())
                (late if step == 3 else torch.log(late - 100)).square().mean().backward()
            optimizer.step()
        assert found._resting
    told = capsys.readouterr().err
    assert "[rank 0, Linear, model 3] VERDICT step 4: software" in told or "log made" in told
    assert "model 3] NOT healthy" in told
