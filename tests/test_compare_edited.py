"""Gradients that a script changes between micro-batches, by groups, or leaves where they are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import bitwitness as bw


def recorded(out: Path, way: str) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    weights = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.05)
    draw = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out):
        for _ in range(2):
            for _ in range(2):
                model(torch.randn(4, 6, generator=draw)).square().mean().backward()
                if way == "each clipped":
                    clip_grad_norm_(weights, 0.05)
            for clipped in _clipped(way, weights):
                clip_grad_norm_(clipped, 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return out


def _clipped(way: str, weights: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    return {"groups": [weights[:2], weights[2:]], "each clipped": []}.get(way, [weights])


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (
            "groups",
            ("differ, by no one factor, when the optimizer reads them", "run B multiplies some by", "others by"),
        ),
        ("each clipped", ("was changed since a backward left it there", "run A leaves it and run B multiplies it by")),
    ],
)
def test_clipping_is_told_by_where_and_by_what(way: str, told: tuple[str, ...], tmp_path: Path) -> None:
    found = bw.compare(recorded(tmp_path / "a", "all"), recorded(tmp_path / "b", way))
    for text in told:
        assert text in found.conclusion, found.conclusion


def test_a_discriminator_that_keeps_what_its_generator_left_is_told_so(tmp_path: Path) -> None:
    def trained(out: Path, *, late: bool) -> Path:
        torch.manual_seed(0)
        g = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 10))
        d = nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(), nn.Linear(16, 1))
        optimizers = [torch.optim.Adam(one.parameters(), lr=2e-3) for one in (g, d)]
        draw = torch.Generator().manual_seed(1)
        with bw.Recorder(d, out=out):
            for _ in range(3):
                fake = g(torch.randn(16, 8, generator=draw))
                if not late:
                    optimizers[1].zero_grad()
                real = torch.randn(16, 10, generator=draw)
                (nn.functional.softplus(-d(real)).mean() + nn.functional.softplus(d(fake.detach())).mean()).backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                if late:
                    optimizers[1].zero_grad()
                nn.functional.softplus(-d(fake)).mean().backward()
                optimizers[0].step()
        return out

    found = bw.compare(trained(tmp_path / "a", late=False), trained(tmp_path / "b", late=True))
    assert "adds to a gradient that is still there" in found.conclusion, found.conclusion
    assert "not zeroed" in found.conclusion
