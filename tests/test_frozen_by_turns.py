"""Parts of a model that are frozen and unfrozen by turns: each set of parameters keeps its own history."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.testing import FaultyDevice, contained, from_mapping

STEPS = 120
STRUCK = {"kind": "multiply", "factor": 1e6, "site": "*/mm*:backward", "steps": [90], "times": 1}


def train(
    turns: str, guard: dict[str, object] | None, faults: list[dict[str, object]]
) -> tuple[list[torch.Tensor], bw.Guard | None]:
    """Train one of three layers a step: in order, or any number of them at random; return the weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    layers = [net[0], net[2], net[4]]
    draw = random.Random(0)
    with contained(), FaultyDevice(from_mapping({"fault": faults}), rank=0, seed=0):
        watching = None if guard is None else bw.Guard(net, optimizer, self_test=False, **guard).start()
        for step in range(STEPS):
            chosen = [layers[step % 3]] if turns == "in order" else draw.sample(layers, draw.randint(1, 3))
            for layer in layers:
                layer.requires_grad_(layer in chosen)
            x = torch.randn(8, 6)
            optimizer.zero_grad()
            (net(x) - x[:, :3]).square().mean().backward()
            optimizer.step()
        if watching is not None:
            watching.close()
    return [p.detach().clone() for p in net.parameters()], watching


@pytest.mark.parametrize("turns", ["in order", "at random"])
def test_a_transient_is_healed(turns: str) -> None:
    healthy, _ = train(turns, None, [])
    healed, guard = train(turns, {"act": "protect"}, [STRUCK])
    assert guard is not None
    assert [(v.step, str(v.cause), str(v.action)) for v in guard.verdicts] == [(90, "transient_hardware", "healed")]
    assert all(map(torch.equal, healthy, healed))
    assert guard.coverage()["parameters"] == {"watched": 6, "of": 6}


@pytest.mark.parametrize("turns", ["in order", "at random"])
def test_a_healthy_one_is_left_alone(turns: str) -> None:
    healthy, _ = train(turns, None, [])
    guarded, guard = train(turns, {}, [])
    assert guard is not None
    assert guard.verdicts == []
    assert all(map(torch.equal, healthy, guarded))


def test_histories_that_are_always_too_short_are_told(capsys: pytest.CaptureFixture) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    with bw.Guard(net, optimizer, self_test=False):
        for step in range(60):
            for position, layer in enumerate(net):
                layer.requires_grad_(bool((step * 37 + 1) >> position & 1) or position == 7)
            optimizer.zero_grad()
            net(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
    assert "had been trained together too rarely for a history of their gradients" in capsys.readouterr().err
