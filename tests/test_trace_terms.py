"""What a replay does not compute again, and what reaches the loss without a gradient, told for what it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw

STRUCK = 2
LABELS = torch.zeros(6, dtype=torch.long)
ACCUSATIONS = ("hardware", "a race")


class Net(nn.Module):
    """Returns logits and a number without gradient; keeps an auxiliary loss and a metric as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)
        self.struck = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.up(x) * float(not self.struck)
        self.auxiliary = h.square().mean()
        self.bad_auxiliary = h.abs().log().sum() if self.struck else self.auxiliary
        with torch.no_grad():
            metric = (h - h).sum() / (h.abs().sum() if self.struck else 1.0)  # <- metric
        self.metric = metric
        return self.down(torch.tanh(self.up(x))), metric


def trained(loss_of, steps: int = 4) -> list[bw.Finding]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(steps):
            net.struck = step == STRUCK
            loss = loss_of(net, torch.randn(6, 8), net.struck)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return trace.findings


def root_penalty(net: Net, x: torch.Tensor, struck: bool) -> torch.Tensor:
    penalty = (net.up.weight * float(not struck)).square().sum().sqrt()
    return F.cross_entropy(net(x)[0], LABELS) + penalty  # the reader


def norm_penalty(net: Net, x: torch.Tensor, struck: bool) -> torch.Tensor:
    penalty = (net.up.weight - net.up.weight * float(struck)).norm().pow(0.5)
    return F.cross_entropy(net(x)[0], LABELS) + penalty  # the reader


def attribute(net: Net, x: torch.Tensor, struck: bool) -> torch.Tensor:
    return F.cross_entropy(net(x)[0], LABELS) + net.auxiliary.sqrt()


def test_a_loss_that_the_model_keeps_as_an_attribute_is_run_again() -> None:
    finding = trained(attribute)[0]
    assert (finding.step, finding.evidence["kind"]) == (STRUCK, "operator")
    assert "sqrt" in finding.message


@pytest.mark.parametrize("loss_of", [root_penalty, norm_penalty], ids=lambda f: f.__name__)
def test_a_term_whose_backward_makes_nan_is_named_and_no_hardware_blamed(loss_of) -> None:
    finding = trained(loss_of)[0]
    assert (finding.step, finding.evidence["kind"]) == (STRUCK, "term")
    assert "does not go back through a term of the loss that leads to the bad gradients" in finding.message
    assert "test_trace_terms.py:" in finding.message
    assert "up.weight" in finding.message
    assert "Backward0" in finding.message
    assert not any(word in finding.message for word in ACCUSATIONS)


def test_the_slope_that_may_have_done_it_is_pointed_at() -> None:
    message = trained(root_penalty)[0].message
    assert "the slope is infinite or undefined of sqrt at zero" in message
    assert "pow" not in message.partition("To do:")[2]  # a square has a finite slope everywhere


def test_a_term_that_is_bad_itself_is_named_with_the_line_that_reads_it() -> None:
    def bad_penalty(net: Net, x: torch.Tensor, struck: bool) -> torch.Tensor:
        penalty = (net.up.weight * float(not struck)).abs().log().mean()
        return F.cross_entropy(net(x)[0], LABELS) + penalty

    (finding,) = trained(bad_penalty, STRUCK + 1)
    assert finding.evidence["kind"] == "term"
    assert "a term of the loss was not finite that the replay does not compute again" in finding.message
    assert "in bad_penalty by add" in finding.message
    assert "MeanBackward0 of LogBackward0 of AbsBackward0" in finding.message


def test_a_bad_term_that_the_model_keeps_as_an_attribute_is_traced_into_the_model() -> None:
    findings = trained(lambda net, x, _struck: F.cross_entropy(net(x)[0], LABELS) + net.bad_auxiliary, STRUCK + 1)
    assert [(f.site.op, f.evidence["kind"]) for f in findings] == [("log", "operator")]


@pytest.mark.parametrize("how", ["output", "attribute", "item"])
def test_what_the_model_computes_without_a_gradient_is_not_taken_for_the_batch(how: str) -> None:
    def loss_of(net: Net, x: torch.Tensor, _struck: bool) -> torch.Tensor:
        out, metric = net(x)
        weight = {"output": metric, "attribute": net.metric, "item": metric.item()}[how]
        return F.cross_entropy(out, LABELS) + weight

    finding = trained(loss_of, STRUCK + 1)[0]
    if how == "item":  # a number has no past
        assert "the code gives it the number nan" in finding.message
    else:
        assert (finding.site.op, finding.evidence["kind"]) == ("div", "operator")
        assert "it divides zero by zero" in finding.message
    assert "the batch was not finite" not in finding.message


def test_a_bad_label_is_not_called_the_batch_of_the_model() -> None:
    def loss_of(net: Net, x: torch.Tensor, struck: bool) -> torch.Tensor:
        target = torch.full((6, 4), float("nan") if struck else 0.0)
        return F.mse_loss(net(x)[0], target)

    finding = trained(loss_of, STRUCK + 1)[0]
    assert finding.evidence["kind"] == "batch"
    assert "a tensor that the script gave to its loss was not finite: loss[mse_loss]" in finding.message


def test_what_no_replay_shows_is_not_said_to_be_hardware() -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    with bw.trace_nonfinite(net) as trace:
        loss = net(torch.randn(6, 8)).square().mean()
        strikes = [float("nan")]
        net.weight.register_hook(lambda grad: grad * (strikes.pop() if strikes else 1.0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    (finding,) = trace.findings
    assert finding.evidence["kind"] == "unknown"
    assert (
        "what made it is not part of that (a hook on a gradient, a generator, counter or other state" in finding.message
    )


def test_an_earlier_backward_that_left_nan_behind_is_told_from_the_step() -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    with bw.trace_nonfinite(net) as trace:
        (net.weight * 0).sum().sqrt().backward()
        net(torch.randn(6, 8)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    (finding,) = trace.findings
    assert "the gradients were so already when the backward of the model's outputs began" in finding.message
