"""Tensors that several modules read, at level modules: each shows the whole gradient, none is accused for another's part."""

from __future__ import annotations

from pathlib import Path

import torch
from step_loop import recorded_steps
from torch import nn
from torch.nn.functional import softplus
from torch.nn.utils.parametrizations import spectral_norm

import bitwitness as bw

STEPS = 3


def recorded(out: Path, model: nn.Module, backward: object) -> Path:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return recorded_steps(out, model, optimizer, backward, STEPS, level="modules")


class Judge(nn.Module):
    """A discriminator whose weight a module makes of a parameter, and that gives a parameter to another."""

    def __init__(self) -> None:
        super().__init__()
        self.read = spectral_norm(nn.Linear(12, 16))
        self.queries = nn.Parameter(torch.randn(4, 16))
        self.norm = nn.LayerNorm(16)
        self.told = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.read(x))
        return self.told(h + torch.softmax(h @ self.norm(self.queries).T, -1) @ self.queries)


def test_modules_that_are_given_parameters_are_not_accused_of_other_calls_gradients(tmp_path: Path) -> None:
    def run(name: str, shift: float, *, pieces: bool) -> Path:
        torch.manual_seed(0)
        model = Judge()

        def backward(step: int) -> None:
            true, made = torch.randn(8, 12), torch.randn(8, 12)
            moved = made + shift * (step == 1)
            (softplus(-model(true)).mean() + softplus(model(moved)).mean()).backward()
            if pieces:
                softplus(-model(torch.randn(8, 12))).mean().backward()

        return recorded(tmp_path / name, model, backward)

    for pieces in (False, True):
        report = bw.compare(run(f"a{pieces}", 0.0, pieces=pieces), run(f"b{pieces}", 0.3, pieces=pieces))
        assert report.conclusion.startswith(
            "the runs part at read/ParametrizedLinear#0:forward.out0 (rank 0, step 1): input in0 differs"
        )
        assert len(report.suspects) == 1


class Heads(nn.Module):
    """A trunk that two heads read."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m = torch.tanh(self.trunk(x))
        return self.a(m), self.b(m)


def test_a_head_is_not_accused_of_what_comes_back_through_the_other(tmp_path: Path) -> None:
    def run(name: str, weight: float) -> Path:
        torch.manual_seed(0)
        model = Heads()

        def backward(_step: int) -> None:
            a, b = model(torch.randn(8, 12))
            (a.square().mean() + weight * b.abs().mean()).backward()

        return recorded(tmp_path / name, model, backward)

    report = bw.compare(run("a", 1.0), run("b", 1.5))
    assert report.conclusion.startswith("the runs part at ./loss#0:forward.value")
    assert len(report.suspects) == 1


class Decoder(nn.Module):
    """Layers that all read one memory; of the first a hook makes more than comes back."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.encoder, self.told, self.factor = nn.Linear(12, 16), nn.Linear(16, 1), factor
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = memory = torch.tanh(self.encoder(x))
        for i, layer in enumerate(self.layers):
            key = layer(memory)
            if i == 0:
                key.register_hook(lambda grad: grad * self.factor)
            h = torch.tanh(h + key)
        return self.told(h)


def test_what_several_modules_read_is_told_once_with_their_names(tmp_path: Path) -> None:
    def run(name: str, factor: float) -> Path:
        torch.manual_seed(0)
        model = Decoder(factor)
        return recorded(tmp_path / name, model, lambda _step: model(torch.randn(8, 12)).square().mean().backward())

    report = bw.compare(run("a", 1.0), run("b", 1.5))
    (only,) = report.suspects
    assert only.site == "layers.0/Linear#0:backward.grad_in0"
    assert only.text.startswith(
        "its inputs agree and its result does not; layers.1/Linear, layers.2/Linear read the same"
    )
