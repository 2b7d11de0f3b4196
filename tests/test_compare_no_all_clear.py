"""Differences that rules for healthy ways of writing must not clear: found by a reader of these rules, each planted here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from step_loop import recorded_steps
from torch import nn

import bitwitness as bw

STEPS = 3


def noisy(out: Path, *, moved: bool, masked: bool = False, silent: bool = False) -> Path:
    """Train a small net under bfloat16, its weights a last bit larger; mask some targets, or lose a norm's gradient."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(32)
    model = nn.Sequential(nn.Linear(16, 32), norm, nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5))
    x, labels = torch.randn(STEPS, 64, 16), torch.randint(0, 5, (STEPS, 64))
    with torch.no_grad():
        for weight in model.parameters() if moved else ():
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, 1e3)))
    if masked:
        labels[:, ::8] = -100

    def backward(step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x[step])
        nn.functional.cross_entropy(out.float(), labels[step]).backward()
        if silent:
            norm.bias.grad.zero_()

    return recorded_steps(out, model, torch.optim.SGD(model.parameters(), lr=0.01), backward, STEPS, level="modules")


@pytest.mark.parametrize("planted", ["masked", "silent"])
def test_noise_under_a_coarse_dtype_clears_neither_other_targets_nor_a_gradient_that_is_lost(
    tmp_path: Path, planted: str
) -> None:
    a = noisy(tmp_path / "a", moved=False)
    assert bw.compare(a, noisy(tmp_path / "b", moved=True)).status == "fine"
    report = bw.compare(a, noisy(tmp_path / "c", moved=True, **{planted: True}))
    assert report.status == "findings", report.conclusion


def test_positions_that_a_coarse_dtype_counts_are_named(tmp_path: Path) -> None:
    def run(name: str, dtype: torch.dtype) -> Path:
        torch.manual_seed(0)
        read, told = nn.Linear(8, 16), nn.Linear(16, 4)
        model = nn.ModuleList([read, told])
        rates = 10000.0 ** -torch.arange(0, 1, 1 / 16)

        def backward(_step: int) -> None:
            h = read(torch.randn(700, 8))
            positions = torch.arange(700, dtype=dtype).float()
            told(h * torch.cos(positions[:, None] * rates)).square().mean().backward()

        return recorded_steps(tmp_path / name, model, torch.optim.SGD(model.parameters(), lr=0.1), backward, STEPS)

    report = bw.compare(run("a", torch.int64), run("b", torch.bfloat16))
    assert report.status == "findings", report.conclusion
    assert "arange" in report.conclusion


@pytest.mark.parametrize("level", ["modules", "mix"])
def test_a_sparse_gradient_that_lacks_terms_is_found(tmp_path: Path, level: str) -> None:
    def run(name: str, padding: int | None) -> Path:
        torch.manual_seed(0)
        words, told = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 2)
        words.padding_idx = padding
        model = nn.Sequential(words, told)

        def backward(_step: int) -> None:
            model(torch.randint(0, 20, (6, 9))).square().mean().backward()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return recorded_steps(tmp_path / name, model, optimizer, backward, STEPS, level=level)

    report = bw.compare(run("a", None), run("b", 3))
    assert report.status == "findings", report.conclusion


def test_steps_of_weights_that_another_net_makes_are_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target, maker = nn.Linear(3, 2), nn.Linear(5, 8)
    optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)
    with bw.Recorder(target, out=tmp_path / "run"):
        for _ in range(4):
            flat = maker(torch.randn(5))
            weights = {"weight": flat[:6].view(2, 3), "bias": flat[6:]}
            torch.func.functional_call(target, weights, (torch.randn(7, 3),)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(bw.Run(tmp_path / "run").steps()) >= 3


def test_the_gradient_of_an_image_that_is_trained_is_recorded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, image = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).requires_grad_(False),
        nn.Parameter(torch.randn(1, 3, 8, 8)),
    )
    optimizer = torch.optim.SGD([image], lr=0.1)
    with bw.Recorder(net, out=tmp_path / "run", level="modules"):
        for _ in range(2):
            net(image).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    slots = {(row["module"], row["slot"]) for row in bw.Run(tmp_path / "run").rows().to_pylist()}
    assert ("0", "grad_in0") in slots
