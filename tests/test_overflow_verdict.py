"""An overflow that every execution makes is the script's, also where products of the backward overflow by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.testing import FaultyDevice, from_mapping


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


def test_no_script_is_blamed_for_an_operator_that_gives_finite_numbers_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mask of zeros and ones that holds an infinity, in every execution of the only device: nobody overflowed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    fault = {"site": "1/bernoulli_:forward", "kind": "bitflip", "bit": -2, "element": 3, "from_step": 4}
    with (
        FaultyDevice(from_mapping({"fault": [fault]})) as device,
        bw.Guard(net, optimizer, self_test=False) as guard,
    ):
        for _ in range(6):
            (net(torch.randn(8, 16)) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert device.fired
    assert not guard.verdicts
    assert guard.coverage()["left_open"] == 1
    assert "but bernoulli_ gives finite numbers alone, so that this is its device's doing" in capsys.readouterr().err
