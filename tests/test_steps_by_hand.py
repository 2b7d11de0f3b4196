"""Steps that a script takes by itself: written out, through ``.data``, or on copies of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bitwitness as bw

RATE = 0.1


def trained(out: Path, way: str, rate: float = RATE, parts: int = 1) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    weights = list(model.parameters())
    copies = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.SGD(copies if way == "copies" else weights, lr=rate) if way in ("torch", "copies") else None
    draw = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out):
        for _ in range(3):
            model.zero_grad()
            for _ in range(parts):
                (model(torch.randn(4, 6, generator=draw)).square().mean() / parts).backward()
            if way == "copies":
                for copy, weight in zip(copies, weights, strict=True):
                    copy.grad = weight.grad.clone()
            if optimizer is not None:
                optimizer.step()
            with torch.no_grad():
                for copy, weight in zip(copies, weights, strict=True):
                    if way == "copies":
                        weight.copy_(copy)
                    elif way == "written out":
                        weight.add_(weight.grad, alpha=-rate)
                    elif way == "data":
                        weight.data = weight.data - rate * weight.grad
    return out


@pytest.mark.parametrize("way", ["written out", "data", "copies"])
@pytest.mark.parametrize("parts", [1, 3])
def test_each_is_a_step_of_its_own(way: str, parts: int, tmp_path: Path) -> None:
    """In micro-batches, too, which are no steps."""
    a, b = trained(tmp_path / "a", "torch", parts=parts), trained(tmp_path / "b", way, parts=parts)
    run = bw.Run(b)
    assert run.steps() == [0, 1, 2]
    assert {row["micro"] for row in run.rows().to_pylist()} == set(range(parts))
    assert not bw.compare(a, b).suspects


@pytest.mark.parametrize("way", ["written out", "data", "copies"])
def test_another_learning_rate_is_no_equal_run(way: str, tmp_path: Path) -> None:
    found = bw.compare(trained(tmp_path / "a", "torch"), trained(tmp_path / "b", way, rate=RATE / 2))
    assert found.suspects
    assert "step 1" in found.conclusion
    assert "was changed between these two steps" in found.conclusion


def test_two_such_runs_are_held_against_each_other_step_by_step(tmp_path: Path) -> None:
    found = bw.compare(trained(tmp_path / "a", "written out"), trained(tmp_path / "b", "written out", rate=RATE / 2))
    assert "was changed between these two steps" in found.conclusion
