"""A target network follows the one that is trained: as far as rounding moves that, and no further, is nobody's fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extent import chosen
from torch import Tensor, nn
from torch.nn import functional as F

import bitwitness as bw
from bitwitness.comparison.beside import compared_beside

STEPS, UPDATED = 5, 1
Update = Callable[[int, Tensor, Tensor], Any]


class Written(nn.Module):
    """A linear layer, written as a product and a sum in the dtype of autocast."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight.t()
        return product + self.bias.to(product.dtype)


def copied(_number: int, target: Tensor, trained: Tensor) -> Tensor:
    return target.copy_(trained)


def averaged(_number: int, target: Tensor, trained: Tensor) -> Tensor:
    return target.lerp_(trained, 0.5)


def forgotten(_number: int, target: Tensor, _trained: Tensor) -> Tensor:
    return target


def one_transposed(number: int, target: Tensor, trained: Tensor) -> Tensor:
    return target.copy_(trained.t() if number == 2 else trained)


def record(out: Path, update: Update, *, half: bool = False, other: bool = False, content: str = "stats") -> Path:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    target = copy.deepcopy(net)
    for model in (net, target) if other else ():
        for place in (0, 2, 4):
            model[place] = Written(model[place])  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(3)
    with bw.Recorder(net, out=out, content=content), bw.Recorder(target, out=out, content=content):
        for step in range(STEPS):
            state, after = torch.randn(2, 32, 8, generator=generator)
            action = torch.randint(4, (32, 1), generator=generator)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                with torch.no_grad():
                    wanted = target(after).max(1).values.float()
                loss = F.smooth_l1_loss(net(state).gather(1, action).squeeze(1).float(), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == UPDATED:
                with torch.no_grad():
                    for number, pair in enumerate(zip(target.parameters(), net.parameters(), strict=True)):
                        update(number, *pair)
    return out


@pytest.mark.parametrize("content", chosen(["stats", "tensors"], ["tensors"]))
@pytest.mark.parametrize("update", [copied, averaged])
def test_a_target_may_drift_as_far_as_what_it_follows(update: Update, content: str, tmp_path: Path) -> None:
    a = record(tmp_path / "a", update, half=True, content=content)
    b = record(tmp_path / "b", update, half=True, other=True, content=content)
    reports = [bw.compare(a, b), *(report for *_, report in compared_beside(a, b).reports)]
    assert [report.status for report in reports] == ["fine", "fine"], [report.conclusion for report in reports]


@pytest.mark.parametrize("content", chosen(["stats", "tensors"], ["tensors"]))
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("wrong", [forgotten, one_transposed])
def test_a_target_that_follows_wrongly_is_found(wrong: Update, half: bool, content: str, tmp_path: Path) -> None:
    a = record(tmp_path / "a", copied, half=half, content=content)
    b = record(tmp_path / "b", wrong, half=half, other=half, content=content)
    ((*_, target),) = compared_beside(a, b).reports
    assert target.status == "findings", target.conclusion
    assert target.first is not None
    assert target.first.step == UPDATED + 1, target.conclusion
    assert "weight differs" in target.conclusion or "bias differs" in target.conclusion, target.conclusion
    assert "changed between these two steps" in target.conclusion
