"""Dropout: a wrong mask or element is found, and a healthy one never suspected."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from watching import found_in, suspected, watched

from bitwitness.sense.checksum_draws import CHECKS


def work(dtype: torch.dtype = torch.float32, size: float = 1.0, p: float = 0.1) -> None:
    x = (torch.randn(64, 128) * size).to(dtype).requires_grad_()
    (torch.native_dropout(x, p, train=True)[0].float() * torch.randn(64, 128)).sum().backward()
    F.dropout(x, p), F.dropout(x.detach().clone(), p, inplace=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_healthy_dropout_is_never_suspected(dtype) -> None:
    for p in (0.01, 0.1, 0.5, 0.9):
        for size in (1.0, 1e-4, 1e-7, 3e4):
            assert not suspected(lambda p=p, size=size: work(dtype, size, p))


def test_all_of_these_operators_were_checked() -> None:
    assert set(CHECKS) <= set(watched(work)[1])


def test_other_draws_and_infinities_are_left_alone() -> None:
    def run() -> None:
        x = torch.randn(8, 16)
        x[2], x[3] = torch.inf, torch.nan
        torch.native_dropout(x, 0.3, train=True), torch.native_dropout(x, 1.0, train=True)
        (
            torch.native_dropout(x, 0.3, train=False),
            F.dropout(x, 1.0),
            F.dropout(x, 0.0),
            F.alpha_dropout(x, 0.1, training=True),
        )
        F.dropout2d(torch.randn(2, 3, 4, 5), 0.3), x.bernoulli_(torch.rand(8, 16)), x.long().bernoulli_(0.3)
        torch.bernoulli(torch.rand(3, 4)), torch.native_dropout(torch.randn(0, 4), 0.3, train=True)

    assert not suspected(run)


@pytest.mark.parametrize("op", sorted(CHECKS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_element_is_found(op, dtype) -> None:
    def spoil(out: Tensor) -> None:
        out[3, 5] = out[3, 5] * 3 + 5

    found_in(lambda: work(dtype), op, 0, spoil)


@pytest.mark.parametrize(("op", "slot"), [("bernoulli_", 0), ("native_dropout", 1)])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_generator_that_draws_one_number_alone_is_found(op, slot, value) -> None:
    assert (
        "as many are kept" in found_in(work, op, slot, lambda mask: mask.fill_(value)).message or op == "native_dropout"
    )
