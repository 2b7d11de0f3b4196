"""Norms that tell whether gradients are finite."""

from __future__ import annotations

import pytest
import torch

import bitwitness as bw
from bitwitness.stats import norms_of, total_of

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
