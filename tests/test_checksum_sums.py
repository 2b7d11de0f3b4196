"""Sums, means, losses, embeddings and pools: a wrong number is found, and a healthy one never suspected."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from extent import chosen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from watching import found_in, suspected, watched

from bitwitness.sense.checksum_sums import CHECKS

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def work(
    dtype: torch.dtype = torch.float32, classes: int = 40, width: int = 24, seed: int = 3, *,
    reduction: str = "mean", smoothing: float = 0.0, weighted: bool = False, alike: bool = False,
) -> None:  # fmt: skip
    """Embed, sum, pool, and take a loss, forward and backward."""
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(classes, width, generator=g).to(dtype).requires_grad_()
    index = torch.zeros(3, 12, dtype=torch.long) if alike else torch.randint(classes, (3, 12), generator=g)
    rows = F.embedding(index, table, padding_idx=1)
    images = torch.randn(2, 3, 12, 16, generator=g).to(dtype).requires_grad_()
    pooled = (
        F.adaptive_avg_pool2d(images, (3, 9)).float().square().sum() + F.max_pool2d(images, 3, stride=2).square().sum()
    )
    pooled = pooled + F.avg_pool2d(images, 2, stride=1).square().sum()
    scores = F.linear(rows.float(), torch.randn(classes, width, generator=g)).flatten(0, 1)
    target = torch.randint(classes, (36,), generator=g)
    target[:9] = -100
    weight = torch.rand(classes, generator=g) + 0.1 if weighted else None
    loss = F.cross_entropy(scores, target, weight, reduction=reduction, label_smoothing=smoothing).sum()
    sums = rows.sum(0).float().mean() + rows.mean((0, 1)).sum() + rows.float().mean(-1, keepdim=True).sum()
    (loss + pooled.float() + sums).backward()


@given(
    st.sampled_from(DTYPES), st.sampled_from([9, 40, 3000]), st.sampled_from([8, 33]), st.integers(0, 1 << 20),
    st.sampled_from(["mean", "sum", "none"]), st.sampled_from([0.0, 0.1]), st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=chosen(200, 25), deadline=None)
def test_healthy_sums_are_never_suspected(dtype, classes, width, seed, reduction, smoothing, weighted, alike) -> None:
    assert not suspected(
        lambda: work(
            dtype, classes, width, seed, reduction=reduction, smoothing=smoothing, weighted=weighted, alike=alike
        )
    )


def test_all_of_these_operators_were_checked() -> None:
    assert set(CHECKS) <= set(watched(work)[1])


@pytest.mark.parametrize("op", sorted(CHECKS))
@pytest.mark.parametrize("factor", [-3.0, 64.0, float("nan")])
def test_a_wrong_element_is_found(op, factor) -> None:
    def spoil(out: Tensor) -> None:
        flat = out.view(-1)
        flat[int(flat.abs().argmax())] *= factor

    found_in(work, op, 0, spoil)


def test_a_loss_gradient_in_the_wrong_place_is_found() -> None:
    def exchange(out: Tensor) -> None:
        out[20] = out[20].roll(1)

    assert found_in(work, "nll_loss_backward", 0, exchange).evidence["row"] == 20


def test_the_total_of_a_loss_s_weights_is_checked() -> None:
    found_in(lambda: work(weighted=True), "nll_loss_forward", 1, lambda total: total.mul_(1.5))


def test_empty_and_other_losses_are_left_alone() -> None:
    def run() -> None:
        everything_ignored = torch.full((4,), -100)
        F.cross_entropy(torch.randn(4, 9, requires_grad=True), everything_ignored).backward()
        F.cross_entropy(torch.randn(2, 9, 4, 4, requires_grad=True), torch.ones(2, 4, 4, dtype=torch.long)).backward()
        F.avg_pool2d(
            torch.randn(2, 3, 9, 9, requires_grad=True), 3, padding=1, ceil_mode=True
        ).square().sum().backward()
        F.nll_loss(torch.randn(9, requires_grad=True), torch.tensor(3)).backward()
        _ = torch.ones(4, 9, dtype=torch.long).sum(), torch.zeros(0, 9).sum(), torch.ones(4, 9).sum(dtype=torch.float64)
        F.embedding(torch.zeros(0, dtype=torch.long), torch.randn(4, 9))
        F.embedding(
            torch.tensor([1, 2, 2]), torch.randn(4, 9, requires_grad=True), scale_grad_by_freq=True
        ).sum().backward()

    assert not watched(run)[0]
