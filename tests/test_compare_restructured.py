"""The same training laid out otherwise: what a model returns, how it takes tokens together, whether a scaler is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw
from bitwitness.comparison.report import Report

WIDTH, TOKENS, STEPS = 16, 31, 3

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Mixture(nn.Module):
    """Experts of which each token has two, beside a shared one; ``routed``: each expert is given its own tokens only."""

    def __init__(self, *, routed: bool, shared: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.shared, self.routed, self.act = nn.Linear(WIDTH, WIDTH), routed, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights = self.gate(flat).sigmoid()
        kept, chosen = weights.topk(2, -1)
        if self.routed:
            y = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                token, place = torch.where(chosen == number)
                y = y.index_add(0, token, expert(flat[token]) * kept[token, place, None])
        else:
            full = torch.zeros_like(weights).scatter(1, chosen, kept)
            y = (full[..., None] * torch.stack([expert(flat) for expert in self.experts], 1)).sum(1)
        return x + (y + self.act(self.shared(flat))).view_as(x)


class Model(nn.Module):
    """A mixture between an embedding and a head, whose logits the script or the model makes."""

    def __init__(self, mixture: nn.Module, *, logits: bool = True) -> None:
        super().__init__()
        self.tok, self.mix, self.head = nn.Embedding(TOKENS, WIDTH), mixture, nn.Linear(WIDTH, TOKENS, bias=False)
        self.logits = logits

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.tok(tokens))
        return self.head(x) if self.logits else x


class Transposed(nn.Module):
    """A linear layer whose weight is stored as GPT-2 stores it; ``right``: it was copied so, too."""

    def __init__(self, layer: nn.Linear, *, right: bool) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.weight, self.bias = nn.Parameter((weight.t() if right else weight).clone().contiguous()), layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view_as(x)


def transposed(*, right: bool) -> nn.Module:
    model = Model(Mixture(routed=False, shared=F.silu))
    model.mix.experts[0] = Transposed(model.mix.experts[0], right=True)
    model.mix.shared = Transposed(model.mix.shared, right=right)
    return model


def plain_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def loss_in_chunks(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    hidden, labels = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    parts = zip(hidden.split(20), labels.split(20), strict=True)
    losses = [F.cross_entropy(F.linear(h, model.head.weight), y, reduction="sum") for h, y in parts]
    return torch.stack(losses).sum() / len(labels)


def unshifted(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    given = tokens[:, :-1]
    return F.cross_entropy(model(given).flatten(0, 1), given.flatten())


def record(
    out: Path, model: Callable[[], nn.Module], loss: Loss = plain_loss, *, half: bool = False, scaled: bool = False
) -> Path:
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(net, out=out):
        for _ in range(STEPS):
            tokens = torch.randint(TOKENS, (4, 13), generator=generator)
            with torch.autocast("cpu", torch.float16, enabled=half):
                value = loss(net, tokens)
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return out


def dense() -> nn.Module:
    return Model(Mixture(routed=False, shared=F.silu))


def small() -> nn.Module:
    """A model whose first layers have gradients among float16's subnormals."""
    model = Model(Mixture(routed=False, shared=F.silu))
    with torch.no_grad():
        model.mix.shared.weight.mul_(1e-3)
        model.mix.gate.weight.mul_(1e-2)
        model.head.weight.mul_(2e-2)
    return model


def compared(a: Path, b: Path) -> Report:
    return bw.compare(a, b)


def test_a_script_that_makes_the_logits_itself_is_fine(tmp_path: Path) -> None:
    a = record(tmp_path / "a", dense)
    b = record(tmp_path / "b", lambda: Model(Mixture(routed=False, shared=F.silu), logits=False), loss_in_chunks)
    assert compared(a, b).status == "fine", compared(a, b).conclusion


def test_tokens_that_are_taken_together_otherwise_hide_no_other_activation(tmp_path: Path) -> None:
    a = record(tmp_path / "a", dense)
    same = compared(a, record(tmp_path / "b", lambda: Model(Mixture(routed=True, shared=F.silu))))
    assert same.status == "fine", same.conclusion
    other = compared(a, record(tmp_path / "c", lambda: Model(Mixture(routed=True, shared=F.gelu))))
    assert other.first is not None
    assert "silu" in other.first.text, other.conclusion
    assert "gelu" in other.first.text


@pytest.mark.parametrize("make", [dense, small])
def test_a_scaler_that_only_one_run_has_is_told_and_fine(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", make, half=True), record(tmp_path / "b", make, half=True, scaled=True)
    report = compared(a, b)
    assert report.status == "fine", report.conclusion
    assert any("scaled 1024 times as much in run B" in note for note in report.notes)


def test_weights_that_are_stored_transposed_are_fine_but_where_one_is_not(tmp_path: Path) -> None:
    a = record(tmp_path / "a", dense)
    same = compared(a, record(tmp_path / "b", lambda: transposed(right=True)))
    assert same.status == "fine", same.conclusion
    other = compared(a, record(tmp_path / "c", lambda: transposed(right=False)))
    assert other.first is not None
    assert other.first.site.startswith("mix.shared/"), other.conclusion


def test_labels_that_are_not_shifted_are_another_part_of_the_input(tmp_path: Path) -> None:
    report = compared(record(tmp_path / "a", dense), record(tmp_path / "b", dense, unshifted))
    assert report.first is not None
    assert "although input" in report.first.text, report.conclusion
    assert "of which it is a view" in report.first.text
