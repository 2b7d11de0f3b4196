"""A port: other names, a convolution as a product, fused projections, the weights loaded; and what went wrong in it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw

WIDTH, HEADS = 32, 4


class Block(nn.Module):
    """The original's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (m(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)).softmax(-1)
        x = x + self.proj((scores @ v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Original(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.pos = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(16, WIDTH) * 0.1)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class SelfAttention(nn.Module):
    """The port's."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.in_proj(x).reshape(b, n, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3).reshape(b, n, WIDTH))


class Layer(nn.Module):
    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.ln_before, self.ln_after, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), SelfAttention()
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(approximate=approximate), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ln_before(x))
        return x + self.feed_forward(self.ln_after(x))


class Port(nn.Module):
    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(48, WIDTH), nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.encoder, self.classifier = nn.Sequential(Layer(approximate), Layer(approximate)), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(len(x), 3, 4, 4, 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(len(x), 16, 48)
        return self.classifier(self.encoder(self.embed(x) + self.position).mean(1))


def ported(old: dict[str, torch.Tensor], order: str = "qkv") -> dict[str, torch.Tensor]:
    new = {
        "embed.weight": old["patch.weight"].flatten(1),
        "embed.bias": old["patch.bias"],
        "position": old["pos"][None],
    }
    for kind in ("weight", "bias"):
        new[f"classifier.{kind}"] = old[f"head.{kind}"]
        for i in range(2):
            names = {"ln_before": "norm1", "ln_after": "norm2", "attention.out_proj": "proj"}
            for name, was in (names | {"feed_forward.0": "fc1", "feed_forward.2": "fc2"}).items():
                new[f"encoder.{i}.{name}.{kind}"] = old[f"blocks.{i}.{was}.{kind}"]
            new[f"encoder.{i}.attention.in_proj.{kind}"] = torch.cat([old[f"blocks.{i}.{m}.{kind}"] for m in order])
    return new


def recorded(out: Path, model: nn.Module) -> Path:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out):
        for _ in range(3):
            x, y = torch.randn(4, 3, 16, 16, generator=draw), torch.randint(0, 5, (4,), generator=draw)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Original()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return recorded(tmp_path_factory.mktemp("original") / "run", model), state


def test_a_right_port_accuses_nobody(original: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    run, state = original
    model = Port()
    model.load_state_dict(ported(state))
    found = bw.compare(run, recorded(tmp_path / "b", model))
    assert not found.suspects, found.conclusion
    assert found.conclusion.startswith("reordering-level differences only")


@pytest.mark.parametrize(("order", "approximate", "named"), [("kqv", "none", "attention"), ("qkv", "tanh", "gelu")])
def test_what_is_wrong_in_a_port_is_named(
    order: str, approximate: str, named: str, original: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    run, state = original
    model = Port(approximate)
    model.load_state_dict(ported(state, order))
    found = bw.compare(run, recorded(tmp_path / "b", model))
    assert found.suspects, found.conclusion
    assert named in found.conclusion or "blocks.0" in found.conclusion, found.conclusion


class Mixing(nn.Module):
    """Self-attention by torch's module, or by projections of its own under the same path."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.own = own
        if own:
            self.q, self.k, self.v, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        else:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * WIDTH, WIDTH))
            self.in_proj_bias, self.out_proj = nn.Parameter(torch.empty(3 * WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.own:
            parts: tuple[torch.Tensor, ...] = self.q(x), self.k(x), self.v(x)
        else:
            parts = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_layer_whose_parameters_are_laid_out_otherwise_accuses_nobody(tmp_path: Path) -> None:
    models = []
    for own in (False, True):
        torch.manual_seed(0)
        shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
        parts = ("q", "k", "v", "out_proj")
        state = {f"{part}.{kind}": torch.randn(shape) * 0.2 for part in parts for kind, shape in shapes.items()}
        for kind in () if own else shapes:
            state[f"in_proj_{kind}"] = torch.cat([state.pop(f"{part}.{kind}") for part in "qkv"])
        torch.manual_seed(1)
        before, after = (
            [nn.Conv2d(3, WIDTH, 4, 4), nn.Flatten(2), nn.Linear(16, WIDTH)],
            [nn.Flatten(), nn.LazyLinear(5)],
        )
        model = nn.Sequential(*before, Mixing(own=own), *after)
        model(torch.zeros(1, 3, 16, 16))
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            inside = state.get(name.removeprefix("3."))
            parameter.data.copy_(torch.randn(parameter.shape) * 0.1 if inside is None else inside)
        models.append(model)
    a, b = (recorded(tmp_path / name, model) for name, model in zip("ab", models, strict=True))
    found = bw.compare(a, b)
    assert not found.suspects, found.conclusion
