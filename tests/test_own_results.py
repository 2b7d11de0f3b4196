"""Steps that nothing can run again: what float64 contradicts in the training itself, step after step, convicts."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness import Cause, Finding, Site
from bitwitness.finding import Severity
from bitwitness.judge.decide import Judgement
from bitwitness.judge.ownresults import OwnResults
from bitwitness.ranks.alone import Alone
from bitwitness.testing import FaultyDevice, load_faults

ALWAYS = {
    "act": "protect",
    "deep_every": 1,
    "trend": {"z": 1e-9, "warmup": 1},
    "replay": {"rest": False},
    "self_test": False,
}


class Unrepeatable(nn.Module):
    """Takes a factor from an iterator that nobody can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.factors = (1.0 + 0.01 * n for n in itertools.count())

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * next(self.factors)


class ReturnsNothing(Unrepeatable):
    """Leaves its result in an attribute."""

    def forward(self, x):
        self.result = super().forward(x)


def train(model, fault: str, tmp_path, steps: int = 12):
    (tmp_path / "faults.toml").write_text(fault)
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with (
        FaultyDevice(load_faults(tmp_path / "faults.toml")),
        contextlib.suppress(SystemExit),
        bw.Guard(net, optimizer, **ALWAYS) as guard,
    ):
        for _ in range(steps):
            out = net(torch.randn(32, 8))
            (net.result if out is None else out).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return guard.coverage()


FAULT = '[[fault]]\nkind = "multiply"\nfactor = 64.0\nsite = "b/mm:backward"\npattern = "column"\nfrom_step = 4\n'


@pytest.mark.parametrize("model", [Unrepeatable, ReturnsNothing])
def test_what_comes_back_in_three_steps_is_a_persistent_fault(model, tmp_path, capsys) -> None:
    table = train(model, FAULT, tmp_path)
    assert table["verdicts"] == ["step 6: persistent_hardware [0] stopped"]
    said = capsys.readouterr().err
    assert "computed step 6 wrongly in b/mm#" in said
    assert "in 3 steps, which could not be run again, float64 contradicted a result of its own" in said
    assert "compiled" not in said


def test_one_such_result_convicts_nobody(tmp_path) -> None:
    table = train(Unrepeatable, FAULT.replace("from_step = 4", "steps = [4]"), tmp_path)
    assert table["verdicts"] == []
    assert table["left_open"] == 11


class Masked(nn.Module):
    """Hides a column of its first product from all gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        mask = torch.ones(16)
        mask[3] = 0.0
        return self.b(torch.tanh(self.a(x) * mask))


def test_a_wrong_result_that_no_gradient_shows_is_not_dismissed(tmp_path, capsys) -> None:
    once = '[[fault]]\nkind = "multiply"\nfactor = 1e6\nsite = "a/addmm:forward"\nelement = 3\nsteps = [4]\ntimes = 1\n'
    table = train(Masked, once, tmp_path)
    assert table["verdicts"] == []
    assert table["left_open"] == 1
    assert table["dismissed"] == 10
    said = capsys.readouterr().err
    assert (
        "step 4 is suspicious, but nothing is proven: a/addmm#0:forward.out0 of rank 0 was contradicted by float64"
        in said
    )
    assert "and no gradient shows it: two replays gave the same bits" in said
    assert "not known: 1 suspicion could neither be proven nor dismissed" in said


def test_a_script_is_not_blamed_for_the_overflow_of_a_number_that_a_checksum_contradicts() -> None:
    """A device that fails in every execution alike gives the same NaN each time, from an operator that is right."""
    overflow = Judgement(Cause.SOFTWARE, reason="in every execution, mul made 1 Inf from finite inputs")
    site = Site.parse("./add#0:forward.out0")
    nan = Finding("nonfinite", site, Severity.ERROR, "not finite: 3 gradients", {}, 3, 0)
    failed = Finding("checksum", site, Severity.ERROR, "computed a wrong result", {"ratio": 1e30}, 3, 0)
    results = OwnResults(Alone())
    assert results.doubted(overflow, [nan]) is overflow
    doubted = results.doubted(overflow, [nan, failed])
    assert doubted.cause is Cause.INCONCLUSIVE
    assert "./add#0:forward.out0 of rank 0 computed a wrong result in this step" in doubted.reason
    assert "mul made 1 Inf" in doubted.reason
    dismissed = Judgement(Cause.DISMISSED, reason="two replays gave the same bits")
    assert results.doubted(dismissed, [failed]) is dismissed
