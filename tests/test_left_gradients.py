"""Gradients that lie there from an earlier step, and to which no backward of this one adds, are none of this step's."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.testing import EVERY_STEP, FaultyDevice, load_faults

ALWAYS = {"act": "protect", **EVERY_STEP}
FAULT = """
[[fault]]
kind = "multiply"
factor = 64.0
site = "{site}#0:forward.out0"
from_step = 5
times = 1
"""


class TwoHeads(nn.Module):
    """A body with two heads, of which each forward uses one; the second learns from a body that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        h = torch.relu(self.body(x))
        return self.a(h) if head == "a" else self.b(h.detach())


def by_turns(*, guarded: bool) -> tuple[list[torch.Tensor], bw.Guard | None]:
    """Train both heads by turns, each with an optimizer that zeroes its own gradients alone; steps 1, 3 … are b's."""
    torch.manual_seed(0)
    net = TwoHeads()
    optimizers = {
        "a": torch.optim.AdamW([*net.body.parameters(), *net.a.parameters()], 0.01),
        "b": torch.optim.AdamW(net.b.parameters(), 0.01),
    }
    with bw.Guard(net, list(optimizers.values()), **ALWAYS) if guarded else contextlib.nullcontext() as guard:
        for _ in range(6):
            x = torch.randn(8, 6)
            for head, optimizer in optimizers.items():
                optimizer.zero_grad()
                net(x, head).square().mean().backward()
                optimizer.step()
    return [p.detach().clone() for p in net.parameters()], guard


def unused(*, guarded: bool) -> tuple[list[torch.Tensor], bw.Guard | None]:
    """Train one head, with gradients that are zeroed in place: the other's are zeros, from which AdamW's decay follows."""
    torch.manual_seed(0)
    net = TwoHeads()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    with bw.Guard(net, optimizer, **ALWAYS) if guarded else contextlib.nullcontext() as guard:
        for _ in range(8):
            optimizer.zero_grad(set_to_none=False)
            net(torch.randn(8, 6), "a").square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()], guard


@pytest.mark.parametrize("train", [by_turns, unused])
def test_every_step_can_be_run_again_and_nothing_is_left_open(train) -> None:
    plain, _ = train(guarded=False)
    guarded, guard = train(guarded=True)
    assert all(map(torch.equal, plain, guarded))
    coverage = guard.coverage()
    assert not any("cannot be run again" in gap for gap in coverage["not_covered"]), coverage["not_covered"]
    assert coverage["dismissed"] == coverage["suspicions"] > 0
    assert not guard.verdicts


@pytest.mark.parametrize(("train", "site"), [(by_turns, "b/addmm"), (unused, "a/addmm")])
def test_a_heal_leaves_them_as_they_are(train, site: str, tmp_path) -> None:
    plain, _ = train(guarded=False)
    (tmp_path / "faults.toml").write_text(FAULT.format(site=site))
    with FaultyDevice(load_faults(tmp_path / "faults.toml")) as device:
        healed, guard = train(guarded=True)
    assert len(device.fired) == 1
    assert guard.coverage()["verdicts"] == ["step 5: transient_hardware [0] healed"]
    assert all(map(torch.equal, plain, healed))
