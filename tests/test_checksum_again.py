"""What picks, pads, compares, pools or resizes: a wrong number is found, and a healthy one never suspected."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from extent import chosen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from watching import found_in, suspected, watched

from bitwitness.sense.checksum_again import CHECKS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU_HAS_NOT = {
    "adaptive_max_pool2d",
    "take",
    "select_scatter",
    "slice_scatter",
    "index_copy",
    "min",
    "_adaptive_avg_pool3d",
}


def picked(x: Tensor, g: torch.Generator) -> list[Tensor]:
    n, c, h, w = x.shape
    at, rows = torch.randint(w, (n, c, h, 4), generator=g), torch.randint(h, (9,), generator=g)
    return [
        F.pad(x, (1, 2, 0, 3)), F.pad(x, (1, 2, 2, 3), mode="reflect"), F.pad(x, (1, 2, 2, 3), mode="replicate"),
        F.pad(x[:, :, 0], (1, 2), mode="reflect"), F.pad(x[:, :, 0], (1, 2), mode="replicate"),
        x.roll((2, -3), (2, 3)), x.flip(3), x.repeat(1, 2, 1, 1), x.tril(), x.triu(1), x[:, 0], x[..., 1:],
        torch.where(x > 0, x, torch.zeros_like(x)), x.masked_fill(x > 0.1, 0.1), x[:, :, rows], x.masked_select(x > 0),
        x.gather(3, at), x.index_select(2, rows), x.scatter(3, at, 0.3), x.index_fill(2, torch.tensor([1, 3]), 0.2),
        x.index_put((torch.tensor([0]),), x[:1] + 1), torch.maximum(x, x.flip(2)), torch.minimum(x, x.flip(2)),
        x.clamp(-0.1, 0.3), x.clamp(min=0.1), x.clamp_max(0.1), F.hardtanh(x, -0.3, 0.3), F.max_pool2d(x, 2),
        *(F.interpolate(x, scale_factor=by) for by in (2, (4.0, 0.5), 1.7)), F.interpolate(x[:, :, 0], scale_factor=2),
        F.interpolate(x[None], scale_factor=2), F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), F.pixel_unshuffle(x[:, :, :8, :8], 2),
        x.scatter_reduce(3, at, x[..., :4] + 1, "amax"), x.scatter_reduce(3, at, x[..., :4], "mean"),
        x.amax(-1), x.amin(-1), x.max(-1)[0], x.topk(3)[0], x.sort(-1)[0],
    ]  # fmt: skip


def summed(x: Tensor, g: torch.Generator) -> list[Tensor]:
    rows, at = torch.randint(3, (x.shape[2],), generator=g), torch.randint(2, x.shape, generator=g)
    found = [
        x.new_zeros(x.shape).index_add(2, rows, x, alpha=2), (x + 1).scatter_add(2, at, x),
        x.index_put((torch.tensor([0, 0, 0]),), x[:1] + 1, accumulate=True),
        F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 2, 2, 1, count_include_pad=False),
        F.adaptive_avg_pool2d(x, (3, 5)), F.adaptive_avg_pool2d(x, (11, 70)),
        F.interpolate(x[:, :, 0], scale_factor=2, mode="linear"),
        *(F.interpolate(x, scale_factor=by, mode="bilinear") for by in (1.7, (7.0, 5.0), 0.23)),
        F.interpolate(x, size=(31, 57), mode="bilinear", align_corners=True), x.norm(dim=-1), x.norm(), F.normalize(x, dim=1),
        *(F.mse_loss(x, x.flip(2), reduction=kind) for kind in ("mean", "none")),
        F.interpolate(x, scale_factor=1.7, mode="bicubic"), F.interpolate(x, size=(31, 57), mode="bicubic", align_corners=True),
        F.grid_sample(x, (2.4 * torch.rand(len(x), 7, 9, 2, generator=g) - 1.2).to(x.dtype), align_corners=False),
        F.huber_loss(x, x.flip(3)), F.smooth_l1_loss(x, x.flip(3), reduction="sum"),
    ]  # fmt: skip
    if x.dtype is torch.float32:
        found += [
            F.max_pool3d(x[None], (1, 2, 2)),
            F.avg_pool3d(x[None], (1, 2, 2)),
            F.interpolate(x[None], scale_factor=2, mode="trilinear"),
        ]
    return found


def work(dtype: torch.dtype = torch.float32, seed: int = 3, size: float = 1.0, mean: float = 0.0) -> None:
    g = torch.Generator().manual_seed(seed)
    shape = 1 + seed % 2, 1 + seed % 3, 8 + seed % 7, 9 + seed % 5
    x = ((torch.randn(shape, generator=g) + mean) * size).to(dtype).requires_grad_()
    for out in (*picked(x, g), *summed(x, g)):
        (out.float() * torch.randn(out.shape, generator=g)).sum().backward()


@given(
    st.sampled_from(DTYPES), st.sampled_from([1.0, 30.0, 1e-3, 1e-6, 1e4]), st.sampled_from([0.0, 1.0, 1000.0]),
    st.integers(0, 1 << 20),
)  # fmt: skip
@settings(max_examples=chosen(200, 10), deadline=None)
def test_healthy_results_are_never_suspected(dtype, size, mean, seed) -> None:
    assert not suspected(lambda: work(dtype, seed, size, mean))


def test_all_of_these_operators_were_checked() -> None:
    assert set(CHECKS) - set(watched(work)[1]) <= CPU_HAS_NOT


@pytest.mark.parametrize("op", sorted(set(CHECKS) - CPU_HAS_NOT))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_element_is_found(op, dtype) -> None:
    if dtype is torch.bfloat16 and op == "grid_sampler_2d":
        pytest.skip("places in bfloat16 are rounded by whole pixels: not checked")
    if dtype is torch.bfloat16 and op in ("avg_pool3d", "max_pool3d_with_indices", "upsample_trilinear3d"):
        pytest.skip("torch's CPU has not this operator in bfloat16")

    def spoil(out: Tensor) -> None:
        flat = out.view(-1)
        flat[len(flat) // 2] = flat[len(flat) // 2] * -3 - 20

    found_in(lambda: work(dtype), op, 0, spoil)


def test_other_dtypes_and_infinities_are_left_alone() -> None:
    def run() -> None:
        x = torch.randn(4, 16)
        x[2, 3], x[1, 1] = torch.inf, torch.nan
        _ = x.masked_fill(x > 0, -torch.inf), x.clamp(0, 1), torch.where(x > 0, x, 0.1), x.amax(-1), x.sort()[0]
        _ = torch.where(x > 0, x, x.double()), x.long().flip(0), x.double().flip(0)
        _ = (
            torch.randn(0, 4).flip(0),
            torch.tensor(3.0).clamp(0, 1),
            x[x > 9],
            torch.arange(4).index_select(0, torch.tensor([1])),
        )
        F.mse_loss(x, x.double()), x.bfloat16().norm(dim=-1), torch.randn(1, 1, 8, 8).bool().flip(3)

    found, _ = watched(run)
    assert not [one for one in found if one.sensor == "checksum"]
