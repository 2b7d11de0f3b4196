"""Norms that tell whether gradients are finite."""

from __future__ import annotations

import pytest
import torch

import bitwitness as bw
from bitwitness.stats import marks_of, norms_of, total_of

CPU = torch.device("cpu")


def test_norms_are_those_of_each_tensor_whatever_its_kind() -> None:
    tensors = [
        torch.full((4,), 3.0),
        torch.zeros(0),
        torch.full((100,), 60000.0).half(),
        torch.ones(3, dtype=torch.int64),
        torch.tensor([3 + 4j]),
        torch.ones(16, dtype=torch.bfloat16),
    ]
    assert norms_of(tensors, CPU).tolist() == [6.0, 0.0, pytest.approx(6e5, rel=1e-3), 0.0, 5.0, 4.0]
    assert norms_of([], CPU).shape == (0,)
    assert bool(total_of(tensors, CPU).isfinite())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_shows(bad: float) -> None:
    tensors = [torch.ones(5), torch.tensor([1.0, bad])]
    assert norms_of(tensors, CPU).isfinite().tolist() == [True, False]
    assert not bool(total_of(tensors, CPU).isfinite())


def test_a_norm_that_overflows_is_no_finding() -> None:
    net = torch.nn.Linear(4, 4)
    with bw.trace_nonfinite(net) as trace:
        (net(torch.ones(2, 4)) * 1e25).sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert bool(torch.stack([p.grad.abs().amax() for p in net.parameters()]).isfinite().all())
    assert trace.findings == []


@pytest.mark.parametrize("compiled", [True, False])
def test_a_mark_depends_on_its_own_tensor_alone(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an edit is told from marks that differ: none shall where another tensor became NaN."""
    if not compiled:
        monkeypatch.setattr("bitwitness.stats.sizes.built", lambda: None)
    tensors = [
        torch.full((300,), -2.0),
        torch.randn(100, 900).t(),
        torch.randn(70_000).bfloat16(),
        torch.tensor([3 + 4j]),
        torch.zeros(0),
        torch.ones(3, dtype=torch.int64),
    ]
    before = marks_of(tensors, CPU)
    for tensor, (norm, high) in zip(tensors[:4], before.t().tolist(), strict=False):
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        assert norm == pytest.approx(float(values.double().norm()), rel=1e-3)
        assert high == float(values.max())
    assert before[:, 4:].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    for bad in (float("nan"), float("inf"), 1e30):
        now = marks_of([torch.tensor([1.0, bad]), *tensors], CPU)
        assert torch.equal(now[:, 1:], before)
    tensors[2][5] += 1000
    assert (marks_of(tensors, CPU) != before).any(0).tolist() == [False, False, True, False, False, False]
