"""What a script keeps of a wrong step in tensors of its own: a verdict that heals the step says that this stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.testing import FaultyDevice, load_faults

FAULT = (
    '[[fault]]\nkind = "multiply"\nfactor = 1e6\nsite = "0/addmm:forward"\npattern = "all"\nsteps = [4]\ntimes = 1\n'
)
STAYS = "a number that the script took from it before"
Keep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def running_mean(mean: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    mean.mul_(0.9).add_(0.1 * loss.detach())
    return loss


def one_of_several(mean: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    mean[1].add_(loss.detach())
    return loss


def nothing(_mean: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    total += loss
    total /= 2
    return total


@pytest.mark.parametrize(("keep", "stays"), [(running_mean, True), (one_of_several, True), (nothing, False)])
def test_what_stays_is_said(keep: Keep, stays: bool, tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(FAULT)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    mean = torch.zeros(3)
    with (
        FaultyDevice(load_faults(tmp_path / "faults.toml")),
        bw.Guard(net, optimizer, act="protect", deep_every=1, self_test=False) as guard,
    ):
        for _ in range(8):
            loss = keep(mean, net(torch.randn(32, 8)).square().mean())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (verdict,) = guard.verdicts
    assert verdict.action == "healed", verdict.message
    assert (STAYS in verdict.message) is stays, verdict.message
    assert not stays or "test_kept_by_the_script.py" in verdict.message
