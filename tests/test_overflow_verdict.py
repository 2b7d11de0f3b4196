"""An overflow that every execution makes is the script's, also where products of the backward overflow by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bitwitness as bw


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e20), (torch.float16, 1e3)])
def test_a_guard_names_who_overflowed(dtype: torch.dtype, scale: float, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with bw.Guard(net, optimizer, self_test=False) as guard:
        for number in range(6):
            x = (torch.randn(8, 16) * (scale if number == 4 else 1.0)).to(dtype)
            (net(x) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (verdict,) = guard.verdicts
    assert (verdict.step, verdict.cause) == (4, "software")
    assert verdict.message.startswith("step 4: in every execution, pow made")
    assert "it overflows: in float64 it comes to" in verdict.message
    assert "test_overflow_verdict.py" in verdict.message
    assert guard.coverage()["left_open"] == 0
    assert "could not judge" not in capsys.readouterr().err
