"""Losses and loops as people write them: what the script computes outside the model is followed, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw

STRUCK = 1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Slope(torch.autograd.Function):
    """Divides by zero in its backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x / (x * 0)


def micro_batches(net, optimizer, step: int) -> None:
    for part in range(4):
        p = net(torch.randn(4, 8)).softmax(-1)
        if step == STRUCK and part == 2:
            p = p * 0
        (-p.log().mean() / 4).backward()
    optimizer.step()
    optimizer.zero_grad()


TEACHER = model()


def teacher(net, optimizer, step: int) -> None:
    x = torch.randn(4, 8)
    out = net(x)
    with torch.no_grad():
        target = TEACHER(x)
    if step == STRUCK:
        target = target * 1e30 * 1e30
    optimizer.zero_grad()
    F.kl_div(out.log_softmax(-1), target.softmax(-1), reduction="batchmean").backward()
    optimizer.step()


def custom_function(net, optimizer, step: int) -> None:
    out = net(torch.randn(4, 8))
    optimizer.zero_grad()
    (Slope.apply(out) if step == STRUCK else out.abs()).mean().backward()
    optimizer.step()


def regulariser(net, optimizer, step: int) -> None:
    loss = net(torch.randn(4, 8)).mean() + 1e-4 * sum(p.square().sum().sqrt() for p in net.parameters())
    if step == STRUCK:
        loss = loss + (net[0].weight * 0).norm(dim=1).pow(0.5).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


TOTAL = torch.zeros(())


def item_assignment(net, optimizer, step: int) -> None:
    out = net(torch.randn(4, 8)).clone()
    out[:, 0] = out[:, 0] / float(step != STRUCK)
    loss = out.mean()
    TOTAL.add_(loss.detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


CRITIC = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
CRITICS = torch.optim.SGD(CRITIC.parameters(), lr=0.1)


def generator(net, optimizer, step: int) -> None:
    fake = net(torch.randn(4, 8))
    CRITICS.zero_grad()
    F.softplus(CRITIC(fake.detach())).mean().backward()
    CRITICS.step()
    optimizer.zero_grad()
    p = torch.sigmoid(CRITIC(fake))
    (-(p * float(step != STRUCK)).log().mean()).backward()
    optimizer.step()


def skips_a_bad_loss(net, optimizer, step: int) -> None:
    loss = (net(torch.randn(4, 8)) * float(step != STRUCK)).abs().log().mean()
    if not torch.isfinite(loss):
        return
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def skips_a_bad_norm(net, optimizer, step: int) -> None:
    loss = (net(torch.randn(4, 8)) * float(step != STRUCK)).abs().log().mean()
    loss.backward()
    norm = sum(p.grad.norm() for p in net.parameters())
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()


def clips_and_measures(net, optimizer, step: int) -> None:
    x = torch.randn(4, 8)
    out = net(x)
    with torch.no_grad():
        accuracy = (out.argmax(-1) == 0).float().mean().item()
    loss = F.cross_entropy(out, torch.zeros(4, dtype=torch.long)) + accuracy * 0
    if step == STRUCK:
        loss = loss / (loss - loss)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()


def two_losses(net, optimizer, step: int) -> None:
    out = net(torch.randn(4, 8))
    optimizer.zero_grad()
    F.cross_entropy(out, torch.zeros(4, dtype=torch.long)).backward(retain_graph=True)
    (out * float(step != STRUCK)).abs().log().mean().backward()
    optimizer.step()


def siamese(net, optimizer, step: int) -> None:
    a, b = net(torch.randn(4, 8)), net(torch.randn(4, 8))
    distance = (a - b).square().sum(-1)
    optimizer.zero_grad()
    (distance * float(step != STRUCK)).sqrt().mean().backward()
    optimizer.step()


LOOPS: dict[Callable[..., None], str] = {
    micro_batches: "log",
    teacher: "mul",
    custom_function: "div",
    regulariser: "pow",
    item_assignment: "div",
    generator: "log",
    skips_a_bad_loss: "log",
    skips_a_bad_norm: "log",
    clips_and_measures: "div",
    two_losses: "log",
    siamese: "div",
}


def run(loop, **settings) -> tuple[list, nn.Module]:
    net = model()
    CRITIC.load_state_dict({name: torch.full_like(p, 0.01) for name, p in CRITIC.state_dict().items()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with bw.trace_nonfinite(net, optimizer, **settings) as trace:
        for step in range(3):
            loop(net, optimizer, step)
    return trace.findings, net


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_scripts_own_operator_is_named_with_its_line(loop) -> None:
    findings, _ = run(loop)
    (finding,) = findings
    assert (finding.step, finding.site.op, finding.site.module) == (STRUCK, LOOPS[loop], ".")
    assert "test_trace_loops.py:" in finding.message


def test_a_model_that_is_not_called_itself_is_sensed_and_the_reason_told() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with bw.trace_nonfinite(net, optimizer) as trace:
        (net[2](net[1](net[0](torch.randn(4, 8)))) * 0).log().sum().backward()
        optimizer.step()
    (finding,) = trace.findings
    assert finding.evidence["kind"] == "unknown"
    assert "the model's own forward is not called; give the module that the training calls" in finding.message


def test_a_model_that_trains_in_evaluation_mode_is_watched() -> None:
    """As ``from_pretrained`` leaves it, where a script forgets ``train()``."""
    net = model().eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(20):
            net(torch.randn(4, 8))  # never used
            micro_batches(net, optimizer, step if step < 2 else 0)
            if step == STRUCK:
                break
    assert [finding.site.op for finding in trace.findings] == ["log"]


def test_a_replay_between_a_forward_and_its_backward_leaves_the_graph_usable() -> None:
    """The gradients of a step that the script skipped are looked at when they are zeroed: after the next forward."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(3):
            loss = (net(torch.randn(4, 8)) * float(step != STRUCK)).abs().log().mean()
            optimizer.zero_grad()
            loss.backward()
            if step != STRUCK:
                optimizer.step()
    assert [(finding.step, finding.site.op) for finding in trace.findings] == [(STRUCK, "log")]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_nothing_is_said_and_nothing_changed_while_all_is_well(loop, monkeypatch) -> None:
    monkeypatch.setattr(f"{__name__}.STRUCK", -1)
    backward, apply = torch.Tensor.backward, torch.autograd.Function.__dict__["apply"]
    findings, watched = run(loop)
    assert findings == []
    assert torch.Tensor.backward is backward
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert torch.overrides._get_current_function_mode_stack() == []
    monkeypatch.setattr(bw, "trace_nonfinite", lambda *_a, **_k: Plain())
    _, plain = run(loop)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), plain.parameters(), strict=True))


class Plain:
    """No tool at all."""

    findings: tuple[()] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_a_forward_after_a_bad_step_was_applied_blames_no_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """The script raises after a forward: what that shows follows from the gradients that were told of."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)

    def train() -> None:
        for step in range(5):
            optimizer.zero_grad()
            loss = net(torch.randn(8, 4)).square().mean()
            if step == 4:
                raise ArithmeticError(f"the loss is {loss.item()}")
            (loss * float("nan") if step == 3 else loss).backward()
            optimizer.step()

    trace = bw.trace_nonfinite(net, optimizer)
    with pytest.raises(ArithmeticError), trace:
        train()
    told = capsys.readouterr().err
    assert told.count("FIRST NON-FINITE VALUE") == 1, told
    assert "look at the optimizer's settings" not in told
    assert len(trace.findings) == 1
