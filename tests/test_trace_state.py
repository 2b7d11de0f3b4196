"""Buffers and settings: what went bad inside a step, between two, or by an optimizer's setting that is long put back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw
from bitwitness.nonfinite.settings import fault_in

STRUCK = 2
INF, NAN = float("inf"), float("nan")
LABELS = torch.zeros(6, dtype=torch.long)


class Normed(nn.Module):
    """A layer, its norm, a head; ``size`` multiplies what is normed."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(8, 16), norm, nn.Linear(16, 4)
        self.size = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.fc(x) * self.size))


def train(net: nn.Module, before, after=lambda _optimizer, _step: None, make=None, steps: int = 5) -> list[bw.Finding]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01) if make is None else make(net)
    with bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(steps):
            before(optimizer, step)
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(6, 8)), LABELS).backward()
            optimizer.step()
            after(optimizer, step)
    return trace.findings


@pytest.mark.parametrize("size", [1e20, 1e25])
def test_running_statistics_that_overflow_in_the_step_name_the_norm(size: float) -> None:
    torch.manual_seed(0)
    net = Normed(nn.BatchNorm1d(16))

    def before(_optimizer, step: int) -> None:
        net.size = size if step == STRUCK else 1.0

    (finding,) = train(net, before)
    assert (finding.step, finding.site.module, finding.site.op) == (STRUCK, "norm", "native_batch_norm")
    assert finding.evidence["kind"] == "operator"
    assert finding.evidence["making"] == "overflow"
    assert finding.evidence["reaches"] == ["buffer norm.running_var"]
    assert "when the step began" not in finding.message


def test_running_statistics_of_one_value_name_the_norm() -> None:
    class Direct(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = x[:1] if self.struck else x
            return torch.native_batch_norm(
                given, self.weight, self.bias, self.running_mean, self.running_var, True, 0.1, 1e-5
            )[0].expand(6, -1)

    net = Normed(Direct(16))

    def before(_optimizer, step: int) -> None:
        net.norm.struck = step == STRUCK

    finding = train(net, before)[0]
    assert (finding.step, finding.site.module, finding.site.op) == (STRUCK, "norm", "native_batch_norm")
    assert finding.evidence["making"] == "single_value"


def test_a_buffer_that_the_script_spoils_between_steps_is_not_the_steps() -> None:
    net = Normed(nn.BatchNorm1d(16))

    def after(_optimizer, step: int) -> None:
        if step == STRUCK:
            net.norm.running_mean[0] = NAN

    (finding,) = train(net, lambda *_: None, after)
    assert finding.step == STRUCK + 1
    assert "norm.running_mean" in finding.message
    assert "it was so when the step began" in finding.message or "not finite when the step began" in finding.message


def groups(net: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[2].parameters()}], lr=0.01)


SETTINGS = [
    (None, 0, "lr", INF, 0.01, "SGD(lr=inf): its learning rate was inf (it is 0.01 now)"),
    (None, 0, "lr", NAN, 0.01, "SGD(lr=nan): its learning rate was nan (it is 0.01 now)"),
    (None, 0, "lr", INF, INF, "SGD(lr=inf): its learning rate was inf"),
    (groups, 1, "weight_decay", INF, 0.0, "weight_decay=inf), group 1: its weight decay was inf (it is 0.0 now)"),
    (groups, 1, "eps", NAN, 1e-8, "group 1: its eps was nan (it is 1e-08 now)"),
]


@pytest.mark.parametrize(("make", "group", "name", "bad", "good", "words"), SETTINGS)
def test_a_setting_that_was_bad_for_one_update_is_named(make, group, name, bad, good, words) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def before(optimizer, step: int) -> None:
        if step == STRUCK:
            optimizer.param_groups[group][name] = bad

    def after(optimizer, step: int) -> None:
        if step == STRUCK:
            optimizer.param_groups[group][name] = good

    finding = train(net, before, after, make)[0]
    assert (finding.step, finding.evidence["kind"], finding.site.phase) == (STRUCK + 1, "optimizer", "optim")
    assert words in finding.message
    assert f"since the update of step {STRUCK}" in finding.message
    assert "did your code" not in finding.message


def test_a_learning_rate_in_a_tensor_is_kept_as_it_was() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    rate = torch.tensor(0.01)

    def before(_optimizer, step: int) -> None:
        rate.fill_(INF if step == STRUCK else 0.01)

    def after(_optimizer, _step: int) -> None:
        rate.fill_(0.01)

    finding = train(net, before, after, lambda net: torch.optim.SGD(net.parameters(), lr=rate))[0]
    assert "its learning rate was inf (it is 0.01 now)" in finding.message


def test_an_eps_that_is_zero_in_the_weights_dtype_is_named() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 4).half()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=False, foreach=False)
    with bw.trace_nonfinite(net, optimizer) as trace:
        for _ in range(2):
            optimizer.zero_grad()
            (net(torch.full((1, 4), 1e-5).half()).sum() * 1e-2).backward()
            optimizer.step()
    (finding,) = trace.findings
    assert finding.evidence["kind"] == "optimizer"
    assert "(eps = 1e-08, which is zero in float16)" in finding.message


def test_a_parameter_that_code_spoils_is_not_the_optimizers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def after(_optimizer, step: int) -> None:
        if step == STRUCK:
            net[0].weight.data[0] = NAN

    finding = train(net, lambda *_: None, after)[0]
    assert finding.evidence["kind"] == "parameter"
    assert "no optimizer's state or settings at that time explain it: other code may have changed it" in finding.message


def test_settings_that_cannot_be_meant_are_found() -> None:
    assert fault_in({"lr": 0.1, "betas": (0.9, 0.999)}, {}) is None
    assert fault_in({"lr": 1e30}, {"lr": 0.1}) == "its learning rate was 1e+30 (it is 0.1 now)"
    assert fault_in({"lr": 0.1, "betas": (0.9, 1.5)}, {}) == "its betas were (0.9, 1.5)"


def test_a_buffer_that_stays_bad_is_told_of_once_and_hides_nothing_that_comes_later() -> None:
    torch.manual_seed(0)
    net = Normed(nn.BatchNorm1d(16))

    def before(_optimizer, step: int) -> None:
        net.size = {STRUCK: 1e25, 12: NAN}.get(step, 1.0)

    findings = train(net, before, steps=14)
    assert [(f.step, f.site.op) for f in findings[:2]] == [(STRUCK, "native_batch_norm"), (12, "mul")]
    assert "the code gives it the number nan" in findings[1].message


def test_a_buffer_that_was_put_right_is_watched_again() -> None:
    torch.manual_seed(0)
    net = Normed(nn.BatchNorm1d(16))

    def before(_optimizer, step: int) -> None:
        net.size = 1e25 if step in (1, 6) else 1.0

    def after(_optimizer, step: int) -> None:
        if step == 3:
            net.norm.reset_running_stats()

    findings = train(net, before, after, steps=8)
    assert [(f.step, f.site.op) for f in findings] == [(1, "native_batch_norm"), (6, "native_batch_norm")]


def test_a_row_that_was_never_read_is_not_said_to_have_been_fine() -> None:
    net = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    net[0].weight.data[7] = NAN
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.arange(6) + (4 if step == STRUCK else 0)), LABELS).backward()
            optimizer.step()
    (finding,) = trace.findings
    assert "it went bad later, or was not read there" in finding.message


def test_a_loss_times_infinity_is_traced_on_an_emulated_device_too() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    idle = bw.testing.Fault(kind="nullify", site="2/addmm*:forward*", steps=(90,))
    with bw.testing.FaultyDevice([idle]), bw.trace_nonfinite(net, optimizer) as trace:
        (F.cross_entropy(net(torch.ones(6, 4)), LABELS) * INF).backward()
        optimizer.step()
    assert [finding.site.op for finding in trace.findings] == ["mul"]
    assert trace.coverage()["failures"] == {}


def test_what_a_bad_step_that_cannot_be_run_again_leaves_behind_is_no_finding_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with bw.Guard(net, optimizer, self_test=False) as guard:
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(6, 8)
            F.cross_entropy(net(x * INF if step == STRUCK else x), LABELS).backward()
            if step == STRUCK:
                net.weight.grad.mul_(2.0)  # whose reason no re-execution knows
            optimizer.step()
    assert guard.verdicts == []
    assert guard.coverage()["left_open"] == 1
    said = capsys.readouterr().err
    assert f"step {STRUCK} is suspicious, but nothing is proven: the step cannot be run again" in said
    assert f"parameters are not finite since the optimizer applied the gradients of step {STRUCK}" in said
