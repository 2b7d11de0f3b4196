"""What scripts of other people broke: their own variables behind a heal, products of three dimensions, masks, empty experts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bitwitness import Guard
from bitwitness.testing import FaultyDevice, from_mapping

VARIABLES = """
import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(31, 53), nn.Linear(53, 53), nn.Linear(53, 7)

    def forward(self, x):
        x = self.a(x)
        calls.append(len(x) * __import__("math").ceil(0.5))  # looks names up, so that all of them are looked at
        return self.c(self.b(x).tanh() + x)


calls, model, seen, total, losses = [], Model(), 0, 0.0, []
optimizer, weight = torch.optim.Adam(model.parameters(), 1e-3), torch.randn(31, 7)
while seen < 14:
    x = torch.randn(23, 31)
    loss = functional.cross_entropy(model(x), (x @ weight).argmax(1))
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert loss.item() == losses[-1], seen
    seen += 1
    total += loss.item()
print("bodies", len(losses), "seen", seen, "calls", len(calls), "total", total == sum(losses))
"""

FAULT = """
[[fault]]
kind = "multiply"
factor = 200
pattern = "column"
site = "b/mm:backward"
steps = [10]
times = 1
"""


def test_a_heal_leaves_the_scripts_own_variables_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(VARIABLES)
    (tmp_path / "fault.toml").write_text(FAULT)
    # in an interpreter of its own: what the test's own modules hold is none of the script's
    command = [sys.executable, "-m", "bitwitness", "run", "--act", "protect", "train.py"]
    settings = {"BITWITNESS_INJECT": str(tmp_path / "fault.toml"), "BITWITNESS_DEEP_EVERY": "1"}
    env = {**os.environ, **settings}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    told = done.stdout + done.stderr
    assert "action healed" in told, told
    assert "bodies 14 seen 14 calls 14 total True" in told, told


class Mixed(nn.Module):
    """A linear layer whose result several products of three dimensions read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
        self.w = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.bmm(h, self.w) + h @ h.transpose(1, 2) @ h)


def test_products_of_three_dimensions_behind_a_linear_layer_are_checked() -> None:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Guard(model, optimizer, deep_every=1, quiet=True) as guard:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 9, 8)).square().mean().backward()
            optimizer.step()
    assert guard.coverage()["failures"] == {}


class Causal(nn.Module):
    """Attention by hand, masked by negative infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(1, 2)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return self.out(scores.masked_fill(future, float("-inf")).softmax(-1) @ x)


@pytest.mark.parametrize("half", [False, True])
def test_a_repeating_fault_in_a_masked_softmax_is_convicted(half: bool) -> None:
    torch.manual_seed(0)
    model = Causal()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    fault = {"kind": "nullify", "pattern": "row", "element": 40, "site": "./_softmax:forward", "from_step": 4}
    with (
        FaultyDevice(from_mapping({"fault": [fault]})),
        Guard(model, optimizer, deep_every=1, act="observe", quiet=True, checksum={"rows_one_in": 1}) as guard,
    ):
        for _ in range(6):
            x = torch.randn(4, 16, 24)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = (model(x).float() - x).square().mean()
            loss.backward()
            optimizer.step()
    assert [verdict.step for verdict in guard.verdicts][:1] == [4]
    assert guard.verdicts[0].cause == "persistent_hardware"
    assert "_softmax" in str(guard.verdicts[0])


class Expert(nn.Module):
    """Sends no row to one of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20), nn.Linear(20, 3)
        self.w = nn.Parameter(torch.randn(20, 20) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(torch.cat([h[:0] @ self.w, h]))


def test_a_step_with_an_empty_product_can_be_judged() -> None:
    torch.manual_seed(0)
    model = Expert()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Guard(model, optimizer, quiet=True) as guard:
        for step in range(40):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 12) * (1e4 if step == 30 else 1.0)).square().mean()
            loss.backward()
            optimizer.step()
    assert guard.findings
    assert not guard.verdicts


def test_a_declared_fault_of_memory_is_one_that_a_seal_sees() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fault = {"kind": "bitflip", "bit": 3, "site": "0.weight/weight:param", "steps": [12], "times": 1}
    with (
        FaultyDevice(from_mapping({"fault": [fault]})) as device,
        Guard(model, optimizer, deep_every=1, quiet=True) as guard,
    ):
        for _ in range(20):
            x = torch.randn(16, 30)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
    assert [one.step for one in device.fired] == [12]
    assert (13, "seal") in [(finding.step, finding.sensor) for finding in guard.findings]
